"""Weight sync from an export function to engines."""

import asyncio

import pytest

from skyrl_core.errors import EngineUnavailableError, WeightSyncError
from skyrl_core.inference.client import EngineClient, LocalTransport
from skyrl_core.testing.fake_engine import FakeEngine
from skyrl_core.weight_sync.sync import sync_weights


def _engine() -> FakeEngine:
    return FakeEngine(lambda request, sampling: ([1], "stop"))


def test_exported_buckets_reach_the_engines_under_the_new_version():
    engine = _engine()
    client = EngineClient([LocalTransport(engine)])
    asyncio.run(sync_weights(lambda: [{"a": 1}, {"b": 2}], client, 3))
    assert engine.loaded == {"a": 1, "b": 2}
    assert asyncio.run(client.versions()) == [3]


def test_an_export_without_weights_is_refused_before_the_engines_forget_theirs():
    engine = _engine()
    client = EngineClient([LocalTransport(engine)])
    with pytest.raises(WeightSyncError, match="no weights for version 3"):
        asyncio.run(sync_weights(list, client, 3))
    assert asyncio.run(client.versions()) == [0]


def test_an_engine_that_died_is_reported_as_such():
    engine = _engine()
    engine.failures["begin_update"] = [ConnectionError("reset")]
    with pytest.raises(EngineUnavailableError, match="engine-0 is gone"):
        asyncio.run(sync_weights(lambda: [{"a": 1}], EngineClient([LocalTransport(engine)]), 3))


def test_any_other_failure_names_the_version():
    engine = _engine()
    engine.failures["load_weights"] = [RuntimeError("out of memory")]
    with pytest.raises(WeightSyncError, match="weights of version 3 did not arrive: RuntimeError: out of memory"):
        asyncio.run(sync_weights(lambda: [{"a": 1}], EngineClient([LocalTransport(engine)]), 3))

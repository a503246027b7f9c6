"""The inference client over scripted engines: who gets what, and what becomes of engines that fail."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.errors import (
    ConfigurationError,
    EngineUnavailableError,
    GenerationTimeoutError,
    WeightSyncError,
)
from skyrl_core.generators.protocol import GenerationRequest
from skyrl_core.inference.client import EngineClient, EngineTransport, LocalTransport, assign_requests
from skyrl_core.testing.fake_engine import Answer, FakeEngine

SAMPLING = SamplingParams(max_generate_length=4)


def _requests(groups: Sequence[int]) -> list[GenerationRequest]:
    """`groups[i]` samples of prompt i; the first prompt id is the request's number."""
    names = [f"data:{prompt}/{sample}" for prompt, size in enumerate(groups) for sample in range(size)]
    return [
        GenerationRequest(prompt_ids=np.array([number], dtype=np.int64), seed=number, session_id=name)
        for number, name in enumerate(names)
    ]


def _echo(request: GenerationRequest, sampling: SamplingParams) -> Answer:
    return [int(request.prompt_ids[0]) + 100], "stop"


class SilentTransport:
    """An engine that never answers; it notes when a caller gives up."""

    name = "engine-silent"

    def __init__(self) -> None:
        self.cancelled = False

    async def call(self, method: str, *args: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def _client(engines: Sequence[FakeEngine], **options: float) -> EngineClient:
    return EngineClient([LocalTransport(engine, f"engine-{i}") for i, engine in enumerate(engines)], **options)


def test_two_engines_share_whole_prompt_groups_in_order():
    assert assign_requests(_requests([2, 2, 2, 2]), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert assign_requests(_requests([3, 3, 3]), 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert assign_requests(_requests([4]), 2) == [[0, 1, 2, 3], []]


def test_requests_without_a_group_are_spread_one_by_one():
    requests = [GenerationRequest(prompt_ids=np.zeros(1, dtype=np.int64), seed=i) for i in range(4)]
    assert assign_requests(requests, 2) == [[0, 1], [2, 3]]


@given(groups=st.lists(st.integers(1, 6), max_size=20), engines=st.integers(1, 5))
def test_every_request_goes_to_one_engine_and_groups_stay_whole(groups: list[int], engines: int):
    requests = _requests(groups)
    assigned = assign_requests(requests, engines)
    assert len(assigned) == engines
    assert [index for indices in assigned for index in indices] == list(range(len(requests)))
    homes: dict[str, set[int]] = {}
    for engine, indices in enumerate(assigned):
        for index in indices:
            homes.setdefault(requests[index].session_id.rpartition("/")[0], set()).add(engine)
    assert all(len(engines_of_group) == 1 for engines_of_group in homes.values())
    # A group sits where its middle falls, so no engine exceeds its even share by a whole largest group.
    if groups:
        assert max(map(len, assigned)) < len(requests) / engines + max(groups) + 1


def test_answers_come_in_the_order_of_the_requests():
    engines = [FakeEngine(_echo), FakeEngine(_echo, version=5)]
    outputs = asyncio.run(_client(engines).generate(_requests([3, 3]), SAMPLING))
    assert [int(output.token_ids[0]) for output in outputs] == [100, 101, 102, 103, 104, 105]
    assert [output.policy_version for output in outputs] == [0, 0, 0, 5, 5, 5]


def test_an_engine_without_requests_is_not_called():
    engines = [FakeEngine(_echo), FakeEngine(_echo), FakeEngine(_echo)]
    asyncio.run(_client(engines).generate(_requests([1]), SAMPLING))
    assert sum(len(engine.calls) for engine in engines) == 1
    assert asyncio.run(_client(engines).generate([], SAMPLING)) == []


def test_a_dead_engine_is_named():
    engines = [FakeEngine(_echo), FakeEngine(_echo)]
    engines[1].failures["generate"] = [ConnectionResetError("peer went away")]
    with pytest.raises(EngineUnavailableError, match=r"engine-1 is gone \(during generate\).*peer went away"):
        asyncio.run(_client(engines).generate(_requests([2, 2]), SAMPLING))


def test_an_engines_own_error_arrives_as_it_is():
    engine = FakeEngine(_echo)
    engine.failures["generate"] = [ConfigurationError("no such thing")]
    with pytest.raises(ConfigurationError, match=r"^no such thing$"):
        asyncio.run(_client([engine]).generate(_requests([1]), SAMPLING))


def test_a_silent_engine_is_a_timeout_that_names_it_and_the_key():
    silent = SilentTransport()
    client = EngineClient([silent], timeout_seconds=0.01)
    with pytest.raises(
        GenerationTimeoutError, match=r"engine-silent did not answer generate within 0.01 s .*timeout_seconds"
    ):
        asyncio.run(client.generate(_requests([1]), SAMPLING))
    assert silent.cancelled


def test_the_first_failure_ends_the_wait_for_the_other_engines():
    silent, engine = SilentTransport(), FakeEngine(_echo)
    engine.failures["generate"] = [EOFError("pipe closed")]
    transports: list[EngineTransport] = [silent, LocalTransport(engine, "engine-1")]
    with pytest.raises(EngineUnavailableError, match="engine-1 is gone"):
        asyncio.run(EngineClient(transports, timeout_seconds=3600).generate(_requests([1, 1]), SAMPLING))
    assert silent.cancelled


def test_an_engine_that_answers_too_little_is_an_error():
    class Forgetful(FakeEngine):
        def generate(self, requests: Any, sampling: Any) -> Any:
            return super().generate(requests, sampling)[:-1]

    with pytest.raises(EngineUnavailableError, match="engine-0 answered 2 of 3 requests"):
        asyncio.run(_client([Forgetful(_echo)]).generate(_requests([3]), SAMPLING))


def test_no_engine_at_all_is_an_error():
    with pytest.raises(EngineUnavailableError, match="no engine"):
        EngineClient([])


def test_an_update_brings_every_bucket_to_every_engine_and_names_the_version():
    engines = [FakeEngine(_echo), FakeEngine(_echo)]
    client = _client(engines)
    asyncio.run(client.update_weights([{"a": 1, "b": 2}, {"c": 3}], 4))
    assert asyncio.run(client.versions()) == [4, 4]
    for engine in engines:
        assert engine.loaded == {"a": 1, "b": 2, "c": 3}
        assert [method for method, _ in engine.calls][:4] == [
            "begin_update",
            "load_weights",
            "load_weights",
            "finish_update",
        ]


def test_an_engine_that_fails_midway_holds_no_version():
    engines = [FakeEngine(_echo, version=3), FakeEngine(_echo, version=3)]
    engines[1].failures["load_weights"] = [WeightSyncError("engine-1: the model has no parameter x")]
    client = _client(engines)
    with pytest.raises(WeightSyncError, match="no parameter x"):
        asyncio.run(client.update_weights([{"x": 1}], 4))
    assert asyncio.run(client.versions())[1] is None


def test_engines_that_disagree_after_an_update_are_named():
    class Stubborn(FakeEngine):
        def finish_update(self, version: int) -> None:
            super().finish_update(version - 1)

    with pytest.raises(WeightSyncError, match="after the update to version 4: engine-1 holds 3"):
        asyncio.run(_client([FakeEngine(_echo), Stubborn(_echo)]).update_weights([{"a": 1}], 4))


def test_health_reports_each_engine_and_never_raises():
    engines = [FakeEngine(_echo), FakeEngine(_echo)]
    engines[1].failures["health"] = [OSError("disk on fire")]
    transports: list[EngineTransport] = [LocalTransport(engine, f"engine-{i}") for i, engine in enumerate(engines)]
    client = EngineClient([*transports, SilentTransport()], health_timeout_seconds=0.5)
    healthy, broken, silent = asyncio.run(client.health())
    assert healthy is None
    assert broken == "OSError: disk on fire"
    assert silent is not None
    assert "engine-silent did not answer health within 0.5 s" in silent


def test_pause_holds_requests_and_resume_lets_them_through():
    entered = threading.Event()

    class Watched(FakeEngine):
        def generate(self, requests: Any, sampling: Any) -> Any:
            entered.set()
            return super().generate(requests, sampling)

    client = _client([Watched(_echo)])

    async def scene() -> list[Any]:
        await client.pause()
        generation = asyncio.ensure_future(client.generate(_requests([1]), SAMPLING))
        await asyncio.to_thread(entered.wait)
        assert not generation.done()
        await client.resume()
        return await generation

    assert len(asyncio.run(scene())) == 1


def test_sleep_and_wake_up_reach_every_engine():
    engines = [FakeEngine(_echo), FakeEngine(_echo)]
    client = _client(engines)
    asyncio.run(client.sleep(level=2))
    asyncio.run(client.wake_up(["weights"]))
    for engine in engines:
        assert engine.calls == [("sleep", (2,)), ("wake_up", (["weights"],))]

"""The store's variables from a Prefect Secret block: only they are taken, and no message shows a value."""

import os
from typing import Any

import pytest
from prefect.blocks.system import Secret

from flows.settings import load_settings
from skyrl_core.errors import ConfigurationError

HIDDEN = "do-not-show"


def block_of(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(name: str) -> Secret:
        return Secret(value=value)

    monkeypatch.setattr(Secret, "aload", load)


def test_the_variables_of_the_block_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from the environment")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere")
    block_of({"AWS_ACCESS_KEY_ID": "from the block"}, monkeypatch)
    load_settings(None, [])
    assert os.environ["AWS_ACCESS_KEY_ID"] == "from the environment"
    load_settings(None, ["flow.store_block=team"])
    assert os.environ["AWS_ACCESS_KEY_ID"] == "from the block"
    assert os.environ["AWS_ENDPOINT_URL"] == "http://elsewhere"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (HIDDEN, r"flow\.store_block=team: the block must hold a JSON object"),
        ({"AWS_ACCESS_KEY_ID": [HIDDEN]}, r"flow\.store_block=team: the block must hold a JSON object of texts"),
        ({"AWS_ACCESS_KEY_ID": "a", "PATH": HIDDEN}, r"flow\.store_block=team: PATH is not for the store"),
    ],
)
def test_other_content_is_refused_without_showing_it(value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block_of(value, monkeypatch)
    before = os.environ["PATH"]
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_settings(None, ["flow.store_block=team"])
    assert HIDDEN not in str(caught.value)
    assert os.environ["PATH"] == before


def test_a_block_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(name: str) -> None:
        raise ValueError(f"Unable to find block document named {name} for block type secret")

    monkeypatch.setattr(Secret, "aload", missing)
    with pytest.raises(ConfigurationError, match=r"flow\.store_block=team: .*Unable to find block document named team"):
        load_settings(None, ["flow.store_block=team"])

"""A tokenizer, environments under test control, and a generator over scripted answers."""

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import Prompt
from skyrl_core.generators.single_turn import SingleTurnGenerator
from skyrl_core.inference.client import EngineClient, LocalTransport
from skyrl_core.testing.fake_engine import FakeEngine, scripted_texts
from skyrl_core.testing.tiny_model import build_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from skyrl_core.data.tokenizer import load_tokenizer

    return load_tokenizer(str(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


class Scripted(BaseTextEnv):
    """Rewards 1 for the text in `extras["want"]`; `extras["fail"]` maps a method's name to what it does instead."""

    closed: list[str]

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.extras = extras or {}
        self._act("make")

    def _act(self, method: str) -> Any:
        act = self.extras.get("fail", {}).get(method)
        return act() if callable(act) else act

    def init(self, prompt: Any) -> Any:
        self._act("init")
        return self.extras.get("chat", prompt), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        replaced = self._act("step")
        if replaced is not None:
            return replaced
        reward = float(action == self.extras.get("want"))
        return BaseTextEnvStepOutput(
            observations=[],
            reward=self.extras.get("reward", reward),
            done=True,
            metadata={},
            postprocessed_action=self.extras.get("postprocessed_action"),
        )

    def get_metrics(self) -> dict[str, Any]:
        return self.extras.get("metrics", {"length": 3, "flag": True, "note": "text"})

    def close(self) -> None:
        self.closed.append(str(self.extras.get("want")))
        self._act("close")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes `scripted_env:Scripted` importable; returns what the closed episodes wanted."""
    module = types.ModuleType("scripted_env")
    vars(module)["Scripted"] = Scripted
    monkeypatch.setitem(sys.modules, "scripted_env", module)
    Scripted.closed = []
    return Scripted.closed


@pytest.fixture
def make_prompt(closed: list[str]) -> Callable[..., Prompt]:
    def make(number: int = 0, content: str | None = None, **extras: Any) -> Prompt:
        return Prompt(
            uid=f"data:{number}",
            messages=({"role": "user", "content": f"{number}+0=" if content is None else content},),
            env_class="scripted_env:Scripted",
            env_extras={"want": str(number), **extras},
            data_source="additions",
        )

    return make


def configured(**changes: Any) -> SkyRLConfig:
    """The default configuration with `section__key=value` changes."""
    tree: dict[str, Any] = {}
    for path, value in changes.items():
        *sections, key = path.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return SkyRLConfig.model_validate(tree)


@pytest.fixture
def make_generator(tokenizer: Any) -> Callable[..., tuple[SingleTurnGenerator, FakeEngine]]:
    def make(texts: Sequence[str], *, eos: bool = True, **changes: Any) -> tuple[SingleTurnGenerator, FakeEngine]:
        engine = FakeEngine(scripted_texts(tokenizer, texts, eos=eos), version=3)
        client = EngineClient([LocalTransport(engine)])
        config = configured(**changes)
        return SingleTurnGenerator(tokenizer, client, config), engine

    return make

"""What is printed is the whole configuration, and reads back to an equal one."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_core.config import SkyRLConfig, config_from_yaml, dump_yaml, list_keys, load_config
from skyrl_core.config.yaml_text import read_yaml, write_yaml

AWKWARD = st.sampled_from(
    [
        "1e-6",
        "yes",
        "null",
        "~",
        "010",
        "1:30",
        "0x1f",
        ".inf",
        "",
        " a ",
        "a: b",
        "#x",
        "- x",
        "'",
        '"',
        "<<",
        "{a}",
        "2020-01-01",
    ]
)
TEXT = st.one_of(AWKWARD, st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="$"), max_size=20))
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), TEXT)
FREE = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=8,
)


def plain(entry: Any) -> Any:
    if isinstance(entry.value, dict):
        return {key: plain(value) for key, value in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(value) for value in entry.value]
    return entry.value.value


@given(FREE)
@settings(max_examples=200, deadline=None)
def test_any_plain_value_survives_writing_and_reading(value: Any) -> None:
    entry = read_yaml(write_yaml({"key": value}), "test")
    assert entry is not None
    assert plain(entry) == {"key": value}


@given(
    free=st.dictionaries(TEXT, FREE, max_size=4),
    rate=st.floats(0, 1, allow_nan=False),
    seed=st.integers(0, 2**62),
    tags=st.none() | st.lists(TEXT, max_size=3),
    project=TEXT,
    stop=st.none() | st.lists(TEXT, max_size=3),
    logger=st.sampled_from(["wandb", ["console", "tensorboard"], []]),
    prompt_length=st.integers(1, 10**6),
    temperature=st.floats(0.01, 10),
)
@settings(max_examples=60, deadline=None)
def test_a_configuration_survives_printing_and_loading(
    free: dict[str, Any],
    rate: float,
    seed: int,
    tags: list[str] | None,
    project: str,
    stop: list[str] | None,
    logger: Any,
    prompt_length: int,
    temperature: float,
) -> None:
    config = SkyRLConfig.model_validate(
        {
            "trainer": {
                "seed": seed,
                "tags": tags,
                "project_name": project,
                "logger": logger,
                "max_prompt_length": prompt_length,
                "policy": {"optimizer_config": {"lr": rate, "max_grad_norm": float("inf")}},
            },
            "generator": {
                "sampling_params": {"stop": stop, "temperature": temperature},
                "inference_engine": {"engine_init_kwargs": free},
            },
        }
    )
    assert config_from_yaml(dump_yaml(config)) == config


def test_the_printed_file_can_be_given_back(tmp_path: Path) -> None:
    config = load_config(None, ["trainer.epochs=3", "generator.sampling_params.temperature=0.7"])
    (tmp_path / "printed.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(tmp_path / "printed.yaml") == config


def test_every_key_is_printed() -> None:
    entry = read_yaml(dump_yaml(SkyRLConfig()), "test")
    assert entry is not None
    printed = plain(entry)
    for key in list_keys():
        value = printed
        for name in key.path.split("."):
            if value is None:
                break
            assert name in value, key.path
            value = value[name]


def test_every_key_says_what_it_means_and_takes() -> None:
    keys = list_keys()
    assert len({key.path for key in keys}) == len(keys) > 400
    for key in keys:
        assert key.description, key.path
        assert key.type, key.path


def test_our_own_keys_are_marked() -> None:
    ours = {key.path for key in list_keys() if key.ours}
    assert {path for path in ours if path.startswith("trainer.")} == {
        "trainer.placement.device",
        "trainer.placement.timeout_seconds",
        "trainer.algorithm.overlong_buffer.len",
        "trainer.algorithm.overlong_buffer.penalty_factor",
        "trainer.trust_remote_code",
        "trainer.eval_greedy",
        "trainer.allow_changed_data",
        "trainer.restore_optimizer",
        "trainer.max_failed_fraction",
    }
    assert all(key.ours for key in list_keys() if key.path.startswith(("flow.", "hooks.")))


def test_every_shipped_configuration_loads_and_can_run() -> None:
    shipped = sorted((Path(__file__).parents[3] / "deployments" / "configs").glob("*.yaml"))
    assert "arithmetic.yaml" in {path.name for path in shipped}
    for path in shipped:
        load_config(path).check_runnable()

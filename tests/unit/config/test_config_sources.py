"""Files and words: what wins, how values are read, what is filled in."""

from pathlib import Path

import pytest

from skyrl_core.config import load_config
from skyrl_core.errors import ConfigurationError


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_words_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "trainer:\n  epochs: 3\n  seed: 7\n")
    config = load_config(file, ["trainer.epochs=4"])
    assert (config.trainer.epochs, config.trainer.seed, config.trainer.eval_interval) == (4, 7, 5)


def test_the_last_of_two_words_wins() -> None:
    assert load_config(None, ["trainer.epochs=4", "trainer.epochs=5"]).trainer.epochs == 5


def test_an_empty_file_and_an_emptied_section_are_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == load_config()
    assert load_config(write(tmp_path, "trainer:\n  # epochs: 3\n")) == load_config()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("trainer.policy.optimizer_config.lr=1e-6", 1e-6),
        ("trainer.policy.optimizer_config.lr=1E-6", 1e-6),
        ("trainer.policy.optimizer_config.lr=1.0e-6", 1e-6),
        ("trainer.policy.optimizer_config.lr=.5", 0.5),
        ("trainer.policy.optimizer_config.lr=1", 1.0),
    ],
)
def test_numbers_are_read_as_omegaconf_reads_them(word: str, value: float) -> None:
    rate = load_config(None, [word]).trainer.policy.optimizer_config.lr
    assert rate == value
    assert isinstance(rate, float)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("True", True), ("yes", True), ("off", False), ("no", False)]
)
def test_truth_values_of_yaml_1_1_are_taken_where_a_truth_value_is_wanted(text: str, value: bool) -> None:
    assert load_config(None, [f"trainer.bf16={text}"]).trainer.bf16 is value


def test_text_stays_text_where_text_is_wanted(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "flow:\n  show: off\ntrainer:\n  run_name: 2025\n"),
        ["trainer.project_name=1e3", "trainer.tags=[1, on]"],
    )
    assert config.flow.show == "off"
    assert config.trainer.run_name == "2025"
    assert config.trainer.project_name == "1e3"
    assert config.trainer.tags == ("1", "on")


@pytest.mark.parametrize(
    "word", ["trainer.seed=010", "trainer.seed=1:30", "trainer.seed='3'", "trainer.seed=2.0", "trainer.seed=true"]
)
def test_nothing_but_a_plain_whole_number_is_a_whole_number(word: str) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.seed=.*: expected whole number, at least 0"):
        load_config(None, [word])


def test_words_reach_deep_into_free_dictionaries(tmp_path: Path) -> None:
    file = write(tmp_path, "generator:\n  inference_engine:\n    engine_init_kwargs: {a: 1, deep: {x: 1}}\n")
    words = [
        "generator.inference_engine.engine_init_kwargs.deep.y=1e-3",
        "generator.inference_engine.engine_init_kwargs.kv_transfer_config.kv_connector=NixlConnector",
        "generator.inference_engine.engine_init_kwargs.list=[1, {k: v}]",
        "generator.inference_engine.engine_init_kwargs.flag=yes",
    ]
    assert load_config(file, words).generator.inference_engine.engine_init_kwargs == {
        "a": 1,
        "deep": {"x": 1, "y": 0.001},
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "list": [1, {"k": "v"}],
        "flag": True,
    }


def test_a_dictionary_for_a_section_sets_its_keys_and_leaves_the_others() -> None:
    optimizer = load_config(None, ["trainer.policy.optimizer_config={lr: 1e-5}"]).trainer.policy.optimizer_config
    assert (optimizer.lr, optimizer.weight_decay) == (1e-5, 0.01)


def test_megatrons_pass_through_parameters_keep_the_defaults_that_are_not_given() -> None:
    word = "trainer.policy.megatron_config.transformer_config_kwargs={recompute_num_layers: 2}"
    given = load_config(None, [word]).trainer.policy.megatron_config.transformer_config_kwargs
    assert (given["recompute_num_layers"], given["recompute_method"]) == (2, "uniform")


def test_environment_variables_are_resolved_in_files_and_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_HOME", "/big/disk")
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("RUN", "2025")
    file = write(tmp_path, 'data:\n  train_data: ["${oc.env:DATA_HOME}/train.parquet"]\n')
    words = [
        "trainer.max_training_steps=${oc.env:STEPS}",
        "trainer.run_name=${oc.env:RUN}",
        "trainer.ckpt_path=${oc.env:NOT_SET,/tmp/ckpts}",
    ]
    config = load_config(file, words)
    assert config.data.train_data == ("/big/disk/train.parquet",)
    assert config.trainer.max_training_steps == 12
    assert config.trainer.run_name == "2025"
    assert config.trainer.ckpt_path == "/tmp/ckpts"


def test_a_home_folder_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load_config(None, ["data.val_data=[~/val.parquet]", "trainer.policy.model.path=~/model"])
    assert config.data.val_data == ("/home/someone/val.parquet",)
    assert config.trainer.policy.model.path == "/home/someone/model"
    assert config.trainer.ckpt_path == "/home/someone/ckpts/"


def test_derived_values_follow_what_they_derive_from() -> None:
    config = load_config(
        None,
        [
            "generator.sampling_params.temperature=0.7",
            "generator.sampling_params.max_generate_length=64",
            "trainer.policy.model.path=/models/a",
            "trainer.max_prompt_length=128",
            "trainer.log_example_interval=3",
        ],
    )
    assert config.trainer.algorithm.temperature == 0.7
    assert config.generator.eval_sampling_params is not None
    assert config.generator.eval_sampling_params.temperature == 0.0
    assert config.generator.eval_sampling_params.max_generate_length == 64
    assert config.trainer.ref.model.path == "/models/a"
    assert config.generator.max_input_length == 128
    assert config.trainer.print_example_interval == 3


def test_values_that_are_given_are_not_derived() -> None:
    words = [
        "generator.eval_sampling_params.temperature=0.5",
        "trainer.algorithm.temperature=0.9",
        "trainer.ref.model.path=/b",
    ]
    config = load_config(None, words)
    assert config.generator.eval_sampling_params is not None
    # As in SkyRL: once any key of it is given, the others are the class's defaults.
    assert config.generator.eval_sampling_params.max_generate_length == 1024
    assert config.trainer.algorithm.temperature == 0.9
    assert config.trainer.ref.model.path == "/b"


def test_several_trackers_or_one() -> None:
    assert load_config(None, ["trainer.logger=console"]).trainer.loggers == ("console",)
    assert load_config(None, ["trainer.logger=[console, tensorboard]"]).trainer.loggers == ("console", "tensorboard")
    assert load_config(None, ["trainer.logger=[]"]).trainer.loggers == ()


def test_a_word_with_the_newer_spelling_wins_over_a_file_with_the_older(tmp_path: Path) -> None:
    file = write(tmp_path, "trainer:\n  eval_interval: 7\n")
    assert load_config(file, ["trainer.eval.interval=9"]).trainer.eval_interval == 9


def test_anchors_and_merge_keys_work_in_files(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "trainer:\n  policy:\n    optimizer_config: &adam {lr: 1e-5, weight_decay: 0.1}\n"
        "  critic:\n    optimizer_config:\n      <<: *adam\n      lr: 2e-5\n",
    )
    trainer = load_config(file).trainer
    assert trainer.policy.optimizer_config.weight_decay == trainer.critic.optimizer_config.weight_decay == 0.1
    assert (trainer.policy.optimizer_config.lr, trainer.critic.optimizer_config.lr) == (1e-5, 2e-5)


def test_a_configuration_cannot_be_changed() -> None:
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.trainer.epochs = 3  # type: ignore[misc]

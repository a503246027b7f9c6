"""Everything that is wrong is said at once, each with its place, what was given, and what is accepted."""

from pathlib import Path

import pytest

from skyrl_core.config import SkyRLConfig, config_from_yaml, load_config
from skyrl_core.errors import ConfigurationError, NotAvailableYetError


def refusal(*words: str, path: Path | None = None) -> str:
    with pytest.raises(ConfigurationError) as error:
        load_config(path, words)
    return str(error.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_all_problems_of_file_and_words_are_in_one_message(tmp_path: Path) -> None:
    file = write(tmp_path, "trainer:\n  epohcs: 2\n  seed: many\n")
    lines = refusal("trainer.strategy=megatron", "generator.top_p=1", "nonsense", path=file).splitlines()
    assert lines[0] == "5 problems in the configuration:"
    assert sorted(line.strip() for line in lines[1:]) == [
        "'nonsense' is not of the form key=value, such as trainer.epochs=2",
        "not available yet: trainer.strategy=megatron (training with Megatron; available: fsdp)",
        f"trainer.seed=many: expected whole number, at least 0 (line 3 of {file})",
        "unknown key generator.top_p; did you mean generator.sampling_params.top_p or "
        "generator.eval_sampling_params.top_p? (word generator.top_p=1)",
        f"unknown key trainer.epohcs; did you mean trainer.epochs? (line 2 of {file})",
    ]


def test_a_missing_feature_alone_has_its_own_error_with_the_same_exit_code() -> None:
    with pytest.raises(NotAvailableYetError) as error:
        load_config(None, ["trainer.strategy=megatron"])
    assert error.value.exit_code == 2
    with pytest.raises(ConfigurationError) as mixed:
        load_config(None, ["trainer.strategy=megatron", "trainer.epohcs=2"])
    assert not isinstance(mixed.value, NotAvailableYetError)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trainer.epochs=two", "trainer.epochs=two: expected whole number, at least 1"),
        ("trainer.epochs=null", "trainer.epochs=null: expected whole number, at least 1"),
        ("trainer.epochs=[1]", "trainer.epochs=[1]: expected whole number, at least 1"),
        ("trainer.bf16=1", "trainer.bf16=1: expected true or false"),
        ("trainer.algorithm.gamma=.nan", "trainer.algorithm.gamma=.nan: expected number, at least 0, at most 1"),
        ("trainer.algorithm.kl_loss_coef=.inf", "trainer.algorithm.kl_loss_coef=.inf: expected number, at least 0"),
        ("trainer.policy.optimizer_config.lr=-1", "trainer.policy.optimizer_config.lr=-1: expected number, at least 0"),
        (
            "trainer.policy.optimizer_config.max_grad_norm=.nan",
            "trainer.policy.optimizer_config.max_grad_norm=.nan: expected number, at least 0",
        ),
        ("data.train_data=a.parquet", "data.train_data=a.parquet: expected list of text"),
        ("trainer.logger=[wandb, wandb]", "trainer.logger=[wandb, wandb]: must name each tracker once"),
        (
            "hooks.trainer=mymodule",
            "hooks.trainer=mymodule: must be written module:function or path/to",
        ),
        ("generator.chat_template_kwargs=yes", "generator.chat_template_kwargs=true: expected keys and values"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_accepted(word: str, message: str) -> None:
    assert refusal(word).startswith(message)


def test_infinity_is_accepted_where_it_means_no_limit() -> None:
    limit = load_config(None, ["trainer.policy.optimizer_config.max_grad_norm=.inf"])
    assert limit.trainer.policy.optimizer_config.max_grad_norm == float("inf")


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "-x", "", "a b", "x" * 129, "ü"])
def test_a_run_name_must_be_a_plain_folder_name(name: str) -> None:
    assert "must be a plain folder name" in refusal(f"trainer.run_name='{name}'")


def test_an_unknown_estimator_is_told_from_one_that_is_not_available() -> None:
    assert "must be one of grpo, " in refusal("trainer.algorithm.advantage_estimator=gropo")
    assert "did you mean grpo?" in refusal("trainer.algorithm.advantage_estimator=gropo")
    assert "not available yet: trainer.algorithm.advantage_estimator=gae" in refusal(
        "trainer.algorithm.advantage_estimator=gae"
    )
    load_config(None, ["trainer.algorithm.advantage_estimator=mine.ways:best"])


def test_a_file_of_the_users_own_is_named_by_its_whole_path_wherever_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "trainer.algorithm.advantage_estimator=own/ways.py:best",
        "trainer.algorithm.policy_loss_type=./own/ways.py:loss",
        "hooks.trainer=ways.py:start",
        "environment.env_class=ways.py:Env",
    ]
    config = load_config(None, words)
    assert config.trainer.algorithm.advantage_estimator == f"{tmp_path}/own/ways.py:best"
    assert config.trainer.algorithm.policy_loss_type == f"{tmp_path}/own/ways.py:loss"
    assert config.hooks.trainer == f"{tmp_path}/ways.py:start"
    assert config.environment.env_class == f"{tmp_path}/ways.py:Env"
    assert "must be written module:function or path/to/file.py:function" in refusal("hooks.trainer=own/a.txt:f")


def test_a_value_for_a_section_names_the_keys_below() -> None:
    assert refusal("trainer.algorithm=grpo") == (
        "trainer.algorithm is a section: give its keys, such as trainer.algorithm.advantage_estimator "
        "(word trainer.algorithm=grpo)"
    )


def test_keys_below_an_unknown_section_are_named_one_by_one(tmp_path: Path) -> None:
    message = refusal(path=write(tmp_path, "training:\n  epochs: 2\n  batch:\n    size: 4\n"))
    assert "unknown key training.epochs; did you mean trainer.epochs?" in message
    assert "unknown key training.batch.size" in message


def test_a_key_that_a_section_needs_is_named() -> None:
    message = refusal("generator.inference_engine.delta_weight_sync.max_file_size_in_gb=2")
    assert message.startswith("generator.inference_engine.delta_weight_sync.sync_dir is needed")


@pytest.mark.parametrize("sign", ["+", "++", "~"])
def test_hydras_prefixes_are_refused_with_the_way_to_write_it(sign: str) -> None:
    assert "leave out the '" in refusal(f"{sign}generator.inference_engine.engine_init_kwargs.x=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  epochs: [1\n", "is not valid YAML in line 3"),
        ("trainer:\n  epochs: 1\n  epochs: 2\n", "line 3: the key 'epochs' is given twice"),
        ("- trainer\n", "must hold keys and values"),
        ("just text\n", "must hold keys and values"),
        ("trainer: &t\n  policy: *t\n", "cannot be used in line"),
        ("trainer:\n  seed: !!python/object:os.system 1\n", "cannot be used in line 2"),
        ("trainer:\n  seed: !!int many\n", "cannot be used in line 2: 'many' is no int"),
        ("trainer:\n  policy: !mine {}\n", "cannot be used in line 2: values with the tag !mine"),
        ("trainer:\n  ? [a]\n  : 1\n", "line 2: a key that is not plain text"),
        ("trainer:\n  run_name: ${trainer.project_name}\n", "only ${oc.env:NAME} and ${oc.env:NAME,default}"),
        ("trainer:\n  run_name: ${oc.env:SURELY_NOT_SET}\n", "the environment variable SURELY_NOT_SET"),
        ("trainer:\n  run_name: ${oc.env:WANDB_API_KEY}\n", "WANDB_API_KEY looks like a secret"),
        ("trainer:\n\tepochs: 1\n", "is not valid YAML in line 2"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML in line 2"),
    ],
)
def test_a_bad_file_is_answered_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    answer = refusal(path=file)
    assert message in answer
    assert str(file) in answer


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert refusal(path=tmp_path / "none.yaml") == f"the configuration file {tmp_path}/none.yaml does not exist"
    assert "Is a directory" in refusal(path=tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"trainer:\n  run_name: \xfc\n")
    assert "is not UTF-8 text" in refusal(path=tmp_path / "latin.yaml")


def test_anchors_cannot_blow_up_a_file(tmp_path: Path) -> None:
    levels = "\n".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 9))
    assert "anchors that repeat" in refusal(path=write(tmp_path, f"x0: &x0 [a]\n{levels}\n"))


def test_a_word_that_is_no_yaml_says_to_quote_it() -> None:
    assert "is not a YAML value, quote it" in refusal("trainer.project_name=[a")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("_SKYRL_USE_NEW_INFERENCE", "unset it"), ("SKYRL_RAY_PG_TIMEOUT_IN_S", "trainer.placement.timeout_seconds")],
)
def test_skyrls_environment_flags_are_refused_with_the_key_to_use(
    monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.setenv(name, "1")
    message = refusal()
    assert name in message
    assert remedy in message


def test_a_stored_configuration_that_this_version_cannot_read_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown key trainer\.of_another_version"):
        config_from_yaml("trainer:\n  of_another_version: 1\n")


def test_the_vllm_engine_may_be_configured_but_not_run_yet() -> None:
    config = load_config(None, ["generator.inference_engine.backend=vllm"])
    with pytest.raises(NotAvailableYetError, match=r"write generator\.inference_engine\.backend=transformers"):
        config.check_runnable()
    load_config(None, ["generator.inference_engine.backend=transformers"]).check_runnable()


def test_a_configuration_built_in_code_is_held_to_the_same_rules_before_it_runs() -> None:
    config = SkyRLConfig.model_validate(
        {"trainer": {"train_batch_size": 100}, "generator": {"inference_engine": {"backend": "transformers"}}}
    )
    with pytest.raises(ConfigurationError, match="must be a multiple of"):
        config.check_runnable()


def test_every_limit_holds_for_the_defaults_and_names_a_key() -> None:
    from skyrl_core.config.availability import LIMITS, missing_features
    from skyrl_core.config.schema import leaves, sections

    assert {limit.path for limit in LIMITS} <= leaves().keys() | sections().keys()
    assert list(missing_features(SkyRLConfig())) == []

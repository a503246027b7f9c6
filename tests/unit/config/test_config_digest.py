"""The digest: equal for a run and its continuation, different where training would differ."""

import subprocess
import sys

import pytest

from skyrl_core.config import config_digest, config_from_yaml, diff_configs, dump_yaml, load_config
from skyrl_core.config.digest import LEFT_OUT, digest_keys
from skyrl_core.config.schema import leaves

SAME = [
    "trainer.epochs=20",
    "trainer.max_training_steps=100",
    "trainer.ckpt_interval=2",
    "trainer.eval_interval=7",
    "trainer.eval_before_train=false",
    "trainer.eval_batch_size=8",
    "trainer.eval_greedy=true",
    "trainer.max_ckpts_to_keep=3",
    "trainer.logger=[console, tensorboard]",
    "trainer.project_name=other",
    "trainer.run_name=other",
    "trainer.tags=[a]",
    "trainer.ckpt_path=/elsewhere",
    "trainer.export_path=/elsewhere",
    "trainer.log_path=/elsewhere",
    "trainer.resume_mode=none",
    "trainer.resume_path=/ckpts/global_step_3",
    "trainer.restore_optimizer=false",
    "trainer.allow_changed_data=true",
    "trainer.dump_eval_results=false",
    "trainer.print_example_interval=10",
    "trainer.placement.device=cpu",
    "trainer.placement.timeout_seconds=5",
    "trainer.micro_train_batch_size_per_gpu=16",
    "trainer.max_tokens_per_microbatch=4096",
    "trainer.gradient_checkpointing=false",
    "generator.eval_n_samples_per_prompt=8",
    "generator.eval_sampling_params.temperature=0.5",
    "generator.inference_engine.timeout_seconds=5",
    "generator.inference_engine.max_batch_size=8",
    "data.val_data=[other.parquet]",
    "data.train_data=[moved.parquet]",
    "data.dataloader.num_workers=0",
    "flow.stage_attempts=9",
    "flow.show=plain",
    "flow.stage_timeout_seconds.update=5",
]
OTHER = [
    "trainer.seed=1",
    "trainer.policy.model.path=/other",
    "trainer.ref.model.path=/other",
    "trainer.policy.optimizer_config.lr=1e-5",
    "trainer.policy.optimizer_config.adam_betas=[0.9,0.99]",
    "trainer.train_batch_size=512",
    "trainer.policy_mini_batch_size=128",
    "trainer.update_epochs_per_batch=2",
    "trainer.algorithm.eps_clip_high=0.28",
    "trainer.algorithm.kl_loss_coef=0.01",
    "trainer.max_prompt_length=256",
    "trainer.bf16=false",
    "generator.n_samples_per_prompt=8",
    "generator.sampling_params.temperature=0.7",
    "generator.sampling_params.stop=[x]",
    "generator.inference_engine.backend=transformers",
    "generator.inference_engine.engine_init_kwargs.quantization=fp8",
    "generator.chat_template_kwargs.enable_thinking=false",
    "environment.env_class=aime",
    "environment.skyrl_gym.search.topk=5",
    "hooks.trainer=mine:make",
]


@pytest.mark.parametrize("word", SAME)
def test_a_run_may_be_continued_with_another(word: str) -> None:
    before, after = load_config(), load_config(None, [word])
    assert before != after
    assert config_digest(before) == config_digest(after)
    assert diff_configs(before, after) == []


@pytest.mark.parametrize("word", OTHER)
def test_a_run_may_not_be_continued_with_another(word: str) -> None:
    before, after = load_config(), load_config(None, [word])
    assert config_digest(before) != config_digest(after)
    path = word.partition("=")[0]
    assert any(path.startswith(changed) for changed, _, _ in diff_configs(before, after))


def test_another_number_of_ranks_may_continue_a_run() -> None:
    words = [
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.ref_num_gpus_per_node=2",
        "generator.inference_engine.num_engines=2",
    ]
    assert config_digest(load_config()) == config_digest(load_config(None, words))


def test_the_one_reduction_that_a_microbatch_s_size_changes_binds_it() -> None:
    legacy = ["trainer.algorithm.loss_reduction=token_mean_legacy"]
    before, after = load_config(None, legacy), load_config(None, [*legacy, "trainer.micro_train_batch_size_per_gpu=2"])
    assert config_digest(before) != config_digest(after)
    assert diff_configs(before, after) == [("trainer.micro_train_batch_size_per_gpu", 1, 2)]
    assert diff_configs(load_config(), after) == [
        ("trainer.algorithm.loss_reduction", "token_mean", "token_mean_legacy"),
        ("trainer.micro_train_batch_size_per_gpu", 1, 2),
    ]


def test_differences_are_listed_with_both_values() -> None:
    after = load_config(
        None, ["trainer.seed=1", "trainer.epochs=9", "trainer.policy.optimizer_config.adam_betas=[0.5,0.6]"]
    )
    assert diff_configs(load_config(), after) == [
        ("trainer.policy.optimizer_config.adam_betas", [0.9, 0.999], [0.5, 0.6]),
        ("trainer.seed", 42, 1),
    ]


def test_every_pattern_leaves_out_a_key_and_new_keys_are_covered() -> None:
    from fnmatch import fnmatchcase

    for pattern in LEFT_OUT:
        assert any(fnmatchcase(path, pattern) for path in leaves()), pattern
    assert set(digest_keys()) < set(leaves())
    assert "trainer.algorithm.eps_clip_low" in digest_keys()


def test_the_digest_survives_storage_and_other_processes() -> None:
    config = load_config(None, ["trainer.seed=3", "generator.inference_engine.engine_init_kwargs={b: 1, a: [x, 2.5]}"])
    assert config_digest(config_from_yaml(dump_yaml(config))) == config_digest(config)
    program = (
        "import sys; from skyrl_core.config import config_digest, config_from_yaml;"
        "print(config_digest(config_from_yaml(sys.stdin.read())))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], input=dump_yaml(config), capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == config_digest(config)


def test_the_order_of_free_keys_does_not_count() -> None:
    word = "generator.inference_engine.engine_init_kwargs="
    one, two = load_config(None, [word + "{a: 1, b: 2}"]), load_config(None, [word + "{b: 2, a: 1}"])
    assert config_digest(one) == config_digest(two)

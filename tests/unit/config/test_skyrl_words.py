"""Words from SkyRL's scripts and documentation are accepted, or refused by name."""

import shlex
from pathlib import Path

import pytest

from skyrl_core.config import load_config
from skyrl_core.config.schema import leaves
from skyrl_core.config.tree import nearest_keys
from skyrl_core.errors import ConfigurationError

WORDS = [
    tuple(line.split(" => "))
    for line in (Path(__file__).parent / "skyrl_words.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_list_is_long_enough_to_mean_something() -> None:
    assert len(WORDS) >= 150
    assert len({words for words, _ in WORDS}) == len(WORDS)


@pytest.mark.parametrize(("words", "outcome"), WORDS)
def test_a_word_of_skyrls_is_accepted_or_refused_by_name(words: str, outcome: str) -> None:
    overrides = shlex.split(words)
    if outcome == "accepted":
        load_config(None, overrides)
        return
    with pytest.raises(ConfigurationError) as refusal:
        load_config(None, overrides)
    assert outcome.removeprefix("refused: ") in str(refusal.value)


def test_the_whole_gsm8k_script_is_accepted_as_skyrl_ships_it() -> None:
    words = """
        data.train_data="['/data/gsm8k/train.parquet']" data.val_data="['/data/gsm8k/validation.parquet']"
        trainer.algorithm.advantage_estimator="grpo" trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct"
        trainer.placement.colocate_all=true trainer.strategy=fsdp2 trainer.placement.policy_num_gpus_per_node=4
        trainer.placement.critic_num_gpus_per_node=4 trainer.placement.ref_num_gpus_per_node=4
        generator.inference_engine.num_engines=2 generator.inference_engine.tensor_parallel_size=2 trainer.epochs=20
        trainer.eval_batch_size=1024 trainer.eval_before_train=true trainer.eval_interval=5
        trainer.update_epochs_per_batch=1 trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256
        trainer.micro_forward_batch_size_per_gpu=64 trainer.micro_train_batch_size_per_gpu=64 trainer.ckpt_interval=10
        trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024
        trainer.policy.optimizer_config.lr=1.0e-6 trainer.algorithm.use_kl_loss=true
        generator.inference_engine.backend=vllm generator.inference_engine.run_engines_locally=true
        generator.inference_engine.weight_sync_backend=nccl generator.inference_engine.async_engine=true
        generator.inference_engine.distributed_executor_backend=mp generator.batched=true environment.env_class=gsm8k
        generator.n_samples_per_prompt=5 generator.inference_engine.gpu_memory_utilization=0.8 trainer.logger="wandb"
        trainer.project_name="gsm8k" trainer.run_name="gsm8k_test" trainer.resume_mode=null
        trainer.log_path="/tmp/skyrl-logs" trainer.ckpt_path="/home/me/ckpts/gsm8k_1.5B_ckpt"
    """
    config = load_config(None, shlex.split(words))
    assert config.trainer.strategy == "fsdp"
    assert config.trainer.placement.policy_ranks == config.generator.inference_engine.total_ranks == 4
    assert config.trainer.resume_mode == "none"


def test_every_moved_key_points_to_one_that_exists() -> None:
    from skyrl_core.config.renamed import ALIASES, MOVED
    from skyrl_core.config.schema import sections

    valid = leaves().keys() | sections().keys()
    assert set(ALIASES.values()) <= set(leaves())
    assert set(MOVED.values()) <= valid
    assert not (ALIASES.keys() | MOVED.keys()) & valid


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("trainer.epohcs", "trainer.epochs"),
        ("epochs", "trainer.epochs"),
        ("trainer.n_samples_per_prompt", "generator.n_samples_per_prompt"),
        ("trainer.algorithm.kl_coef", "trainer.algorithm.kl_loss_coef"),
        ("trainer.policy.optimizer.lr", "trainer.policy.optimizer_config.lr"),
        ("generator.sampling_params.temprature", "generator.sampling_params.temperature"),
        ("data.train_file", "data.train_data"),
        ("trainer.placement.policy_gpus_per_node", "trainer.placement.policy_num_gpus_per_node"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_one_that_was_meant(mistyped: str, meant: str) -> None:
    assert nearest_keys(mistyped)[0] == meant

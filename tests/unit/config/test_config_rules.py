"""Rules between keys: each refuses what cannot work, names the keys, and accepts what can."""

import pytest

from skyrl_core.config import SkyRLConfig, load_config
from skyrl_core.errors import ConfigurationError

ENGINE = "generator.inference_engine"
TIS_CAP = "trainer.algorithm.tis_imp_ratio_cap"
TRANSFORMERS = f"{ENGINE}.backend=transformers"

CASES = [
    # Words that break a rule, the beginning of its message, and words that mend it.
    (
        ["trainer.train_batch_size=96", "trainer.policy_mini_batch_size=64"],
        "trainer.train_batch_size=96 must be a multiple of trainer.policy_mini_batch_size=64",
        ["trainer.policy_mini_batch_size=48"],
    ),
    (
        ["trainer.train_batch_size=32"],
        "trainer.train_batch_size=32 must be a multiple of trainer.policy_mini_batch_size=256",
        ["trainer.policy_mini_batch_size=32"],
    ),
    (
        [
            "trainer.policy_mini_batch_size=1",
            "generator.n_samples_per_prompt=3",
            "trainer.placement.policy_num_gpus_per_node=4",
            "trainer.placement.ref_num_gpus_per_node=4",
            f"{ENGINE}.num_engines=4",
        ],
        "trainer.policy_mini_batch_size x generator.n_samples_per_prompt is 3, fewer rows than the 4 ranks",
        ["generator.n_samples_per_prompt=4"],
    ),
    (
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm"],
        "trainer.algorithm.max_seq_len must be set for loss_reduction=seq_mean_token_sum_norm",
        ["trainer.algorithm.max_seq_len=1536"],
    ),
    (
        ["trainer.algorithm.use_kl_in_reward=true"],
        "trainer.algorithm.use_kl_in_reward and use_kl_loss exclude each other",
        ["trainer.algorithm.use_kl_loss=false"],
    ),
    (
        ["trainer.algorithm.off_policy_correction.tis_ratio_type=token", "generator.sampling_params.logprobs=null"],
        "trainer.algorithm.off_policy_correction compares trainer and engine: set generator.sampling_params.logprobs=1",
        ["generator.sampling_params.logprobs=1"],
    ),
    (
        ["trainer.algorithm.policy_loss_type=dppo", "trainer.algorithm.use_tis=true", f"{TIS_CAP}=2"],
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token with policy_loss_type=dppo",
        ["trainer.algorithm.policy_loss_type=cispo"],
    ),
    (
        ["trainer.algorithm.use_tis=true"],
        "trainer.algorithm.use_tis=true needs tis_imp_ratio_cap above 0, got -1",
        [f"{TIS_CAP}=2"],
    ),
    (
        ["trainer.algorithm.overlong_buffer.len=1025"],
        "trainer.algorithm.overlong_buffer.len=1025 must not be above generator.sampling_params.max_generate_length",
        ["trainer.algorithm.overlong_buffer.len=1024"],
    ),
    (
        ["trainer.algorithm.advantage_estimator=maxrl", "trainer.algorithm.overlong_buffer.len=256"],
        "trainer.algorithm.advantage_estimator=maxrl needs rewards that are not negative",
        ["trainer.algorithm.overlong_buffer.len=null"],
    ),
    (
        ["generator.n_samples_per_prompt=1"],
        "trainer.algorithm.advantage_estimator=grpo compares the samples of a prompt",
        ["trainer.algorithm.advantage_estimator=remax"],
    ),
    (
        ["trainer.logprobs_chunk_size=null"],
        "trainer.logprobs_chunk_size=null is only for",
        ["trainer.logprobs_chunk_size=64"],
    ),
    (
        ["generator.sampling_params.temperature=0"],
        "generator.sampling_params.temperature=0 gives a prompt the same answer every time",
        ["generator.sampling_params.temperature=0.1"],
    ),
    (
        [f"{ENGINE}.num_engines=2"],
        "trainer.placement.colocate_all puts engines and policy on the same devices, but the engines need 2",
        ["trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=2"],
    ),
    (
        [f"{ENGINE}.num_engines=2", f"{ENGINE}.tensor_parallel_size=2"],
        "trainer.placement.colocate_all puts engines and policy on the same devices, but the engines need 4",
        ["trainer.placement.colocate_all=false"],
    ),
    (
        ["trainer.placement.ref_num_gpus_per_node=2"],
        "the reference model shares the policy's devices, but has 1 x 2 ranks to its 1 x 1",
        ["trainer.algorithm.use_kl_loss=false"],
    ),
    (
        ["trainer.placement.colocate_all=false", "trainer.placement.ref_num_gpus_per_node=2"],
        "the reference model shares the policy's devices",
        ["trainer.placement.colocate_policy_ref=false"],
    ),
    (
        [f"{ENGINE}.expert_parallel_size=4"],
        f"{ENGINE}.expert_parallel_size=4 must be 1 or data_parallel_size x tensor_parallel_size, which is 1",
        [f"{ENGINE}.tensor_parallel_size=4", "trainer.placement.colocate_all=false"],
    ),
    (
        [TRANSFORMERS, f"{ENGINE}.tensor_parallel_size=2", "trainer.placement.colocate_all=false"],
        f"{ENGINE}.backend=transformers holds each engine on one device",
        [f"{ENGINE}.tensor_parallel_size=1", f"{ENGINE}.num_engines=2"],
    ),
    (
        [TRANSFORMERS, f"{ENGINE}.engine_init_kwargs.quantization=fp8"],
        f"{ENGINE}.engine_init_kwargs goes to vLLM; backend=transformers takes none of quantization",
        [f"{ENGINE}.backend=vllm"],
    ),
    (
        ["generator.max_input_length=1024"],
        "generator.max_input_length=1024 must equal trainer.max_prompt_length=512",
        ["trainer.max_prompt_length=1024"],
    ),
    (
        ["generator.batched=true", "generator.chat_template_kwargs.enable_thinking=false"],
        "generator.batched=true does not take generator.chat_template_kwargs",
        ["generator.batched=false"],
    ),
    (
        ["data.dataloader.persistent_workers=true", "data.dataloader.num_workers=0"],
        "data.dataloader.persistent_workers=true needs data.dataloader.num_workers above 0",
        ["data.dataloader.num_workers=2"],
    ),
    (["data.val_data=[]"], "data.val_data is empty", ["trainer.eval_interval=-1"]),
    (["trainer.max_ckpts_to_keep=0"], "trainer.max_ckpts_to_keep=0 would keep none", ["trainer.max_ckpts_to_keep=1"]),
    (
        ["trainer.resume_mode=from_path"],
        "trainer.resume_mode=from_path needs trainer.resume_path",
        ["trainer.resume_path=/c"],
    ),
]


@pytest.mark.parametrize(("words", "message", "remedy"), CASES, ids=[case[1][:60] for case in CASES])
def test_a_broken_rule_names_the_keys_and_is_mended_by_them(words: list[str], message: str, remedy: list[str]) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_config(None, words)
    assert str(error.value).startswith(message)
    load_config(None, words + remedy)


BUILT = [
    # Rules of features that load_config does not let through yet.
    ({"trainer": {"algorithm": {"advantage_estimator": "gae"}}}, "gae needs a critic: set trainer.critic.model.path"),
    (
        {"trainer": {"critic": {"model": {"path": "c"}}, "critic_mini_batch_size": 100}},
        "must be a multiple of trainer.critic_mini_batch_size=100",
    ),
    (
        {"trainer": {"critic": {"model": {"path": "c"}}, "placement": {"critic_num_nodes": 2}}},
        "puts critic and policy on the same devices, but they have 2 and 1 ranks",
    ),
    (
        {"generator": {"inference_engine": {"external_proxy_url": "http://h:1"}}},
        "external engines cannot share devices with training",
    ),
    (
        {"generator": {"inference_engine": {"run_engines_locally": False}}},
        "needs external_proxy_url or external_server_urls",
    ),
    ({"generator": {"inference_engine": {"enable_pd": True}}}, "num_prefill is 0 of 1 engines"),
    ({"generator": {"max_turns": 3, "max_input_length": 100}}, "must be at least trainer.max_prompt_length=512"),
    ({"generator": {"max_turns": 3, "batched": True}}, "generator.batched=true is for single-turn generation"),
    (
        {
            "generator": {
                "inference_engine": {"engine_init_kwargs": {"hf_overrides": {"rope_parameters": {"rope_type": "yarn"}}}}
            }
        },
        "must equal trainer.policy.model_config_kwargs.rope_parameters",
    ),
]


@pytest.mark.parametrize(("values", "message"), BUILT, ids=[case[1][:60] for case in BUILT])
def test_rules_of_features_to_come_hold_too(values: dict[str, object], message: str) -> None:
    broken = SkyRLConfig.model_validate(values).broken_rules()
    assert len(broken) == 1
    assert message in broken[0]


def test_the_defaults_break_no_rule() -> None:
    assert SkyRLConfig().broken_rules() == []


def test_minibatches_need_not_divide_evenly_over_ranks_and_microbatches() -> None:
    # SkyRL refuses both: 6 x 5 = 30 rows over 4 ranks, and 15 rows in microbatches of 8.
    load_config(
        None,
        [
            "trainer.train_batch_size=6",
            "trainer.policy_mini_batch_size=6",
            "trainer.micro_train_batch_size_per_gpu=8",
            "trainer.placement.policy_num_gpus_per_node=4",
            "trainer.placement.ref_num_gpus_per_node=4",
            f"{ENGINE}.num_engines=4",
        ],
    )


def test_rules_wait_until_every_key_is_right() -> None:
    with pytest.raises(ConfigurationError) as error:
        load_config(None, ["trainer.train_batch_size=many", "trainer.policy_mini_batch_size=2000"])
    assert str(error.value) == "trainer.train_batch_size=many: expected whole number, at least 1"


def test_rules_are_reported_beside_missing_features() -> None:
    with pytest.raises(ConfigurationError) as error:
        load_config(None, ["trainer.strategy=megatron", "trainer.max_ckpts_to_keep=0"])
    assert "2 problems" in str(error.value)


def test_skyrls_older_spelling_of_token_tis_means_the_same() -> None:
    config = load_config(None, ["trainer.algorithm.use_tis=true", f"{TIS_CAP}=3"])
    correction = config.trainer.algorithm.off_policy_correction
    assert (correction.tis_ratio_type, correction.token_tis_ratio_clip_high) == ("token", 3.0)

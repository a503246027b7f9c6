"""Single-turn rollouts over scripted engines and environments."""

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import Prompt, Rollout
from skyrl_core.data.seeds import derive_seed
from skyrl_core.errors import ConfigurationError, EngineUnavailableError, RewardError, RolloutError
from skyrl_core.generators.single_turn import SingleTurnGenerator
from skyrl_core.testing.fake_engine import FakeEngine

MakePrompt = Callable[..., Prompt]
MakeGenerator = Callable[..., tuple[SingleTurnGenerator, FakeEngine]]
EOS = 2


def _run(
    generator: SingleTurnGenerator,
    prompts: Sequence[Prompt],
    n_samples: int = 1,
    purpose: Any = "rollout",
    step: int = 4,
) -> list[Rollout]:
    return asyncio.run(
        generator.generate(
            prompts,
            step=step,
            n_samples=n_samples,
            sampling=SamplingParams(max_generate_length=8),
            run_seed=11,
            purpose=purpose,
        )
    )


def _raise(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def test_a_rollout_holds_prompt_response_mask_logprobs_and_the_reward_on_its_last_token(
    make_prompt: MakePrompt, make_generator: MakeGenerator, tokenizer: Any
):
    generator, _ = make_generator(["7", "12"])
    rollouts = _run(generator, [make_prompt(7), make_prompt(12)])
    first, second = rollouts
    assert first.uid == "data:7"
    assert tokenizer.decode(first.prompt_ids) == "<bos><user>7+0=<assistant>"
    assert first.response_ids.tolist() == [8 + 7, EOS]
    assert first.loss_mask.tolist() == [1, 1]
    assert first.rollout_logprobs is not None
    assert first.rollout_logprobs.tolist() == [-0.5, -0.5]
    assert first.token_rewards.tolist() == [0.0, 1.0]
    assert second.response_ids.tolist() == [8 + 1, 8 + 2, EOS]
    assert second.reward == 1.0
    assert (first.stop_reason, first.policy_versions, first.data_source) == ("stop", (3,), "additions")
    assert first.env_metrics == {"length": 3.0, "flag": 1.0}
    assert first.error is None


def test_samples_stand_side_by_side_with_seeds_of_step_uid_and_index(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    generator, engine = make_generator(["0", "1", "5", "5"])
    rollouts = _run(generator, [make_prompt(0), make_prompt(5)], n_samples=2)
    assert [(r.uid, r.sample_index, r.reward) for r in rollouts] == [
        ("data:0", 0, 1.0),
        ("data:0", 1, 0.0),
        ("data:5", 0, 1.0),
        ("data:5", 1, 1.0),
    ]
    (requests, _), *_ = [args for method, args in engine.calls if method == "generate"]
    assert [request.seed for request in requests] == [
        derive_seed(11, "rollout", 4, uid, index) for uid in ("data:0", "data:5") for index in (0, 1)
    ]
    assert [request.session_id for request in requests] == ["data:0/0", "data:0/1", "data:5/0", "data:5/1"]


def test_evaluation_seeds_do_not_depend_on_the_step(make_prompt: MakePrompt, make_generator: MakeGenerator):
    generator, engine = make_generator(["0", "0"])
    _run(generator, [make_prompt(0)], purpose="eval", step=1)
    _run(generator, [make_prompt(0)], purpose="eval", step=2)
    seeds = [args[0][0].seed for method, args in engine.calls if method == "generate"]
    assert seeds == [derive_seed(11, "eval", "data:0", 0)] * 2


def test_one_failing_environment_fails_one_trajectory_and_is_no_reward_of_zero(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    broken = make_prompt(1, fail={"step": _raise(OSError("judge unreachable"))})
    generator, _ = make_generator(["0", "1", "2"], trainer__max_failed_fraction=0.4)
    good, bad, other = _run(generator, [make_prompt(0), broken, make_prompt(2)])
    assert (good.reward, other.reward) == (1.0, 1.0)
    assert bad.error == "OSError: judge unreachable"
    assert bad.stop_reason == "error"
    assert bad.loss_mask.tolist() == [0, 0]
    assert bad.response_ids.tolist() == [8 + 1, EOS]


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("make", ValueError("no ground truth"), "ValueError: no ground truth"),
        ("init", KeyError("db"), "KeyError: 'db'"),
        ("step", SystemExit(3), "RuntimeError: SystemExit: 3"),
        ("step", StopIteration(), "RuntimeError: StopIteration: "),
        ("step", TimeoutError("verifier gave up"), "TimeoutError: verifier gave up"),
        ("close", RuntimeError("container stuck"), "RuntimeError: container stuck"),
    ],
)
def test_whatever_an_environment_raises_stays_with_its_trajectory(
    make_prompt: MakePrompt, make_generator: MakeGenerator, method: str, error: BaseException, text: str
):
    broken = make_prompt(9, fail={method: _raise(error)})
    generator, _ = make_generator(["0", "0", "0"], trainer__max_failed_fraction=0.5)
    rollouts = _run(generator, [broken, make_prompt(0)])
    assert rollouts[0].error == text
    assert len(rollouts[0].prompt_ids) > 0
    assert rollouts[1].error is None
    assert rollouts[1].reward == 1.0


def test_an_environment_that_failed_to_start_is_not_generated_for(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    broken = make_prompt(9, fail={"init": _raise(RuntimeError("no"))})
    generator, engine = make_generator(["0"], trainer__max_failed_fraction=0.5)
    bad, good = _run(generator, [broken, make_prompt(0)])
    (requests, _), *_ = [args for method, args in engine.calls if method == "generate"]
    assert [request.session_id for request in requests] == ["data:0/0"]
    assert bad.response_ids.tolist() == []
    assert bad.token_rewards.tolist() == [0.0]
    assert good.reward == 1.0


def test_an_environment_that_hangs_fails_its_trajectory_and_starves_no_other(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    release = threading.Event()
    hanging = [make_prompt(100 + i, fail={"step": lambda: release.wait()}) for i in range(2)]
    generator, _ = make_generator(
        [str(i) for i in (0, 0, 0, 1, 2)],
        environment__timeout_seconds=0.3,
        trainer__max_failed_fraction=0.5,
        environment__skyrl_gym__max_env_workers=1,
    )
    rollouts = _run(generator, [*hanging, make_prompt(0), make_prompt(1), make_prompt(2)])
    release.set()
    assert [rollout.error for rollout in rollouts[:2]] == ["TimeLimitError: took longer than 0.3 s"] * 2
    assert [rollout.reward for rollout in rollouts[2:]] == [1.0, 1.0, 1.0]


def test_more_failures_than_allowed_stop_the_step_with_counts_and_the_first_error(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    broken = [make_prompt(i, fail={"step": _raise(OSError(f"down {i}"))}) for i in (1, 2)]
    generator, _ = make_generator(["0"] * 4, trainer__max_failed_fraction=0.25)
    with pytest.raises(
        RolloutError,
        match=r"2 of 4 trajectories failed, more than trainer.max_failed_fraction=0.25 allows; the first was "
        r"data:1/0: OSError: down 1",
    ) as raised:
        _run(generator, [make_prompt(0), *broken, make_prompt(3)])
    assert raised.value.sample is not None
    assert raised.value.sample["error"] == "OSError: down 1"


def test_as_many_failures_as_allowed_do_not(make_prompt: MakePrompt, make_generator: MakeGenerator):
    broken = make_prompt(1, fail={"step": _raise(OSError())})
    generator, _ = make_generator(["0"] * 4, trainer__max_failed_fraction=0.25)
    rollouts = _run(generator, [make_prompt(0), broken, make_prompt(2), make_prompt(3)])
    assert sum(rollout.error is not None for rollout in rollouts) == 1


def test_no_reward_at_all_is_the_trajectorys_failure(make_prompt: MakePrompt, make_generator: MakeGenerator):
    generator, _ = make_generator(["0", "1"], trainer__max_failed_fraction=0.5)
    silent, _ = _run(generator, [make_prompt(0, reward=None), make_prompt(1)])
    assert silent.error == "ValueError: the environment gave no reward"


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39, "1", [0.5]])
def test_a_reward_that_is_no_finite_number_is_an_error_naming_the_sample(
    make_prompt: MakePrompt, make_generator: MakeGenerator, reward: Any, closed: list[str]
):
    generator, _ = make_generator(["0", "1"], trainer__max_failed_fraction=1.0)
    with pytest.raises(RewardError, match="data:1/0") as raised:
        _run(generator, [make_prompt(0), make_prompt(1, reward=reward)])
    assert raised.value.sample is not None
    assert raised.value.sample["uid"] == "data:1, sample 0"
    assert raised.value.sample["response"] == "1<eos>"
    assert sorted(closed) == ["0", "1"]


@pytest.mark.parametrize("reward", [True, 2, np.float32(0.5), -1.5])
def test_numbers_of_every_kind_are_rewards(make_prompt: MakePrompt, make_generator: MakeGenerator, reward: Any):
    generator, _ = make_generator(["0"])
    assert _run(generator, [make_prompt(0, reward=reward)])[0].reward == float(reward)


def test_an_unknown_environment_is_a_configuration_error_not_a_failed_trajectory(make_generator: MakeGenerator):
    generator, _ = make_generator(["0"], trainer__max_failed_fraction=1.0)
    prompt = Prompt(uid="a", messages=({"role": "user", "content": "1"},), env_class="arithmetik")
    with pytest.raises(ConfigurationError, match="arithmetic"):
        _run(generator, [prompt])


def test_an_empty_response_keeps_its_reward(make_prompt: MakePrompt, make_generator: MakeGenerator):
    generator, _ = make_generator([""], eos=False)
    rollout = _run(generator, [make_prompt(0, want="")])[0]
    assert rollout.response_ids.tolist() == []
    assert rollout.token_rewards.tolist() == [1.0]
    assert rollout.reward == 1.0
    assert rollout.error is None


def test_rewards_of_cut_responses_can_be_zeroed(make_prompt: MakePrompt, make_generator: MakeGenerator):
    for zeroed, reward in ((False, 1.0), (True, 0.0)):
        generator, _ = make_generator(["0"], eos=False, generator__zero_reward_on_non_stop=zeroed)
        rollout = _run(generator, [make_prompt(0)])[0]
        assert rollout.stop_reason == "length"
        assert rollout.reward == reward


def test_cut_responses_can_be_masked_out_with_their_reward_kept(make_prompt: MakePrompt, make_generator: MakeGenerator):
    for filtered, mask in ((False, [1, 1]), (True, [0, 0])):
        generator, _ = make_generator(["12"], eos=False, generator__apply_overlong_filtering=filtered)
        rollout = _run(generator, [make_prompt(12)])[0]
        assert rollout.loss_mask.tolist() == mask
        assert rollout.reward == 1.0
    generator, _ = make_generator(["12"], generator__apply_overlong_filtering=True)
    assert _run(generator, [make_prompt(12)])[0].loss_mask.tolist() == [1, 1, 1]


def test_the_environments_version_of_the_action_replaces_the_sampled_one(
    make_prompt: MakePrompt, make_generator: MakeGenerator
):
    generator, _ = make_generator(["12 and more"])
    rollout = _run(generator, [make_prompt(12, reward=1.0, postprocessed_action="12")])[0]
    assert rollout.response_ids.tolist() == [8 + 1, 8 + 2]
    assert rollout.token_rewards.tolist() == [0.0, 1.0]
    generator, _ = make_generator(["12"], trainer__max_failed_fraction=1.0)
    rollout = _run(generator, [make_prompt(12, postprocessed_action=12)])[0]
    assert rollout.error == "TypeError: postprocessed_action must be a string, got int"


def test_the_environment_may_rewrite_the_prompt(make_prompt: MakePrompt, make_generator: MakeGenerator, tokenizer: Any):
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1"}]
    generator, _ = make_generator(["0"])
    rollout = _run(generator, [make_prompt(0, chat=chat)])[0]
    assert tokenizer.decode(rollout.prompt_ids) == "<bos><system>add<user>1<assistant>"


def test_a_prompt_over_the_input_limit_is_an_error_naming_it(make_prompt: MakePrompt, make_generator: MakeGenerator):
    generator, _ = make_generator(["0"], generator__max_input_length=10)
    chat = [{"role": "user", "content": "12345678"}]
    with pytest.raises(RolloutError, match=r"data:5 has 11 tokens .* generator.max_input_length=10"):
        _run(generator, [make_prompt(5, chat=chat)])


def test_a_chat_that_no_template_takes_fails_its_trajectory(
    make_prompt: MakePrompt, make_generator: MakeGenerator, closed: list[str]
):
    generator, _ = make_generator(["0"], trainer__max_failed_fraction=0.5)
    odd, good = _run(generator, [make_prompt(5, chat=[{"role": "user"}]), make_prompt(0)])
    assert odd.error is not None
    assert odd.error.startswith("no prompt from the environment's chat: ")
    assert len(odd.prompt_ids) > 0
    assert good.reward == 1.0
    assert sorted(closed) == ["0", "5"]


def test_environments_are_closed_when_the_engine_fails(
    make_prompt: MakePrompt, make_generator: MakeGenerator, closed: list[str]
):
    generator, engine = make_generator([])
    engine.failures["generate"] = [ConnectionError("gone")]
    with pytest.raises(EngineUnavailableError, match="engine-0 is gone"):
        _run(generator, [make_prompt(0), make_prompt(1)])
    assert sorted(closed) == ["0", "1"]


def test_blocking_environments_run_side_by_side(make_prompt: MakePrompt, make_generator: MakeGenerator):
    # Each waits for the other three: one after the other, they would wait until their time limit.
    together = threading.Barrier(4)

    def meet() -> None:
        together.wait()

    prompts = [make_prompt(i, fail={"step": meet}) for i in range(4)]
    generator, _ = make_generator(
        ["0", "1", "2", "3"], environment__skyrl_gym__max_env_workers=4, environment__timeout_seconds=60.0
    )
    assert [(rollout.reward, rollout.error) for rollout in _run(generator, prompts)] == [(1.0, None)] * 4


def test_numbers_of_an_environment_that_cannot_be_averaged_are_left_out_and_logged(
    make_prompt: MakePrompt, make_generator: MakeGenerator, caplog: pytest.LogCaptureFixture
):
    numbers = {"ok": np.float32(0.5), "yes": np.bool_(True), "nan": math.nan, "far": np.float64(-np.inf), "odd": 1j}
    generator, _ = make_generator(["0"])
    rollout = _run(generator, [make_prompt(0, metrics=numbers)])[0]
    assert rollout.env_metrics == {"ok": 0.5, "yes": 1.0}
    assert (rollout.reward, rollout.error) == (1.0, None)
    assert "trajectory data:0/0: its environment's far, nan is not finite; left out" in caplog.text


def test_without_threads_environments_run_in_the_event_loop(make_prompt: MakePrompt, make_generator: MakeGenerator):
    where: list[int] = []
    prompt = make_prompt(0, fail={"init": lambda: where.append(threading.get_ident())})
    generator, _ = make_generator(["0"], environment__skyrl_gym__max_env_workers=0)
    assert _run(generator, [prompt])[0].reward == 1.0
    assert where == [threading.get_ident()]


def test_samples_do_not_see_each_others_changes_to_the_row(make_prompt: MakePrompt, make_generator: MakeGenerator):
    shared = {"numbers": [1]}
    prompt = make_prompt(0, extra_info=shared)
    generator, _ = make_generator(["0", "0"])
    _run(generator, [prompt], n_samples=2)
    assert shared == {"numbers": [1]}
    assert "max_turns" not in prompt.env_extras


def test_the_configured_template_and_its_variables_are_used(
    make_prompt: MakePrompt, make_generator: MakeGenerator, tokenizer: Any, tmp_path: Any
):
    file = tmp_path / "template.jinja"
    file.write_text("{{ greeting }}{{ messages[0]['content'] }}", encoding="utf-8")
    generator, _ = make_generator(
        ["0"],
        generator__chat_template={"source": "file", "name_or_path": str(file)},
        generator__chat_template_kwargs={"greeting": "hi "},
    )
    rollout = _run(generator, [make_prompt(0)])[0]
    assert tokenizer.decode(rollout.prompt_ids) == "hi 0+0="

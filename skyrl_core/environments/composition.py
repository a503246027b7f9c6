"""A trajectory's reward from several weighted functions: the environment's own and functions of the user's."""

from collections.abc import Callable, Mapping

from skyrl_core.algorithms.rewards import CombinedReward, combine_rewards
from skyrl_core.config.environment import ENVIRONMENT_REWARD, RewardConfig
from skyrl_core.data.carriers import Prompt
from skyrl_core.environments.rewards import check_reward
from skyrl_core.user_code import load_callable

RewardFunction = Callable[[str, Prompt], float | None]
"""`function(response, prompt)`: a number, or None where it cannot score."""


class RewardComposer:
    """Adds up what `environment.rewards` names; without names the reward is the environment's.

    Raises ConfigurationError when a function cannot be loaded.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._rewards = dict(rewards) or {ENVIRONMENT_REWARD: RewardConfig(function=ENVIRONMENT_REWARD)}
        self._composed = bool(rewards)
        self._functions: dict[str, RewardFunction] = {
            name: load_callable(reward.function, f"environment.rewards.{name}.function")
            for name, reward in self._rewards.items()
            if reward.function != ENVIRONMENT_REWARD
        }

    def __call__(self, environment: object, response: str, prompt: Prompt, sample: str) -> CombinedReward:
        """The weighted sum of what the functions say about a response, and `reward/{name}` of each, unweighted.

        `environment` is what the environment said. Raises RewardError for a value that is no finite number (it names
        `sample` and function), ValueError when no function scored the sample; what a function raises is passed on.
        """
        values = {
            name: self._functions[name](response, prompt) if name in self._functions else _own(environment, sample)
            for name in self._rewards
        }
        combined = combine_rewards(values, {name: reward.weight for name, reward in self._rewards.items()}, sample)
        if combined.total is None and self._composed:
            raise ValueError(f"no reward: {', '.join(self._rewards)} could not score it")
        if combined.total is None:
            raise ValueError("the environment gave no reward")
        return combined if self._composed else CombinedReward(total=combined.total)


def _own(reward: object, sample: str) -> float | None:
    return None if reward is None else check_reward(reward, sample)

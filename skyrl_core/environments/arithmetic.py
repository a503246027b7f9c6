"""Additions with a short worked solution: the environment of the quick start."""

import re
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

# Sum of the units, sum of the tens with the carry, then the answer: 38+45 is worked as "13,08;83".
_WORKED_SOLUTION = re.compile(r"[0-9]{2},[0-9]{2};[0-9]{1,3}")


class ArithmeticEnv(BaseTextEnv):
    """One turn: the reward is 1.0 when what follows the last `;` of the text is the sum, else 0.0.

    `extras["reward_spec"]["ground_truth"]` holds the sum in decimal digits. The metric `format` says whether the text
    was a worked solution of the expected form, right or wrong.
    """

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        reward_spec = (extras or {}).get("reward_spec")
        truth = reward_spec.get("ground_truth") if isinstance(reward_spec, dict) else None
        if not isinstance(truth, str) or not _is_number(truth):
            raise ValueError(f"reward_spec.ground_truth must be a text of decimal digits, got {truth!r}")
        self._sum = _plain(truth)
        self._well_formed = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Scores the answer; the episode is over."""
        self.turns += 1
        text = action.strip()
        self._well_formed = _WORKED_SOLUTION.fullmatch(text) is not None
        _, separator, answer = text.rpartition(";")
        right = bool(separator) and _is_number(answer) and _plain(answer) == self._sum
        return BaseTextEnvStepOutput(observations=[], reward=float(right), done=True, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        """`format`: 1.0 when the text had the form of a worked solution."""
        return {"format": float(self._well_formed)}


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _plain(digits: str) -> str:
    # As text, because Python refuses to convert thousands of digits, which a model may well write.
    return digits.lstrip("0") or "0"

"""Addition with a short worked solution: `27+35=` is answered `12,06;62` — units, tens with the carry, then the sum."""

import re
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from skyrl_core.errors import DatasetError

_FORM = re.compile(r"\d+,\d+;\d+")


class ArithmeticEnv(BaseTextEnv):  # type: ignore[misc]
    """Reward 1 when what follows the last `;` is the sum in `reward_spec.ground_truth`, else 0. One turn.

    Metric: `format`, 1 when the answer has the form of a worked solution.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        spec = (extras or {}).get("reward_spec") or {}
        if "ground_truth" not in spec:
            raise DatasetError("the arithmetic environment needs a column reward_spec with ground_truth, the sum")
        self._answer = str(spec["ground_truth"])
        self._metrics: dict[str, float] = {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the one answer."""
        text = action.strip()
        self._metrics = {"format": float(_FORM.fullmatch(text) is not None)}
        _, separator, answer = text.rpartition(";")
        reward = float(bool(separator) and answer == self._answer)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    def get_metrics(self) -> dict[str, Any]:
        """What the last step found."""
        return dict(self._metrics)


def worked_solution(left: int, right: int) -> str:
    """The answer that the warm-up teaches for `left + right`, both below 100."""
    units = left % 10 + right % 10
    tens = left // 10 + right // 10 + units // 10
    return f"{units:02d},{tens:02d};{left + right}"

"""Stop strings: which rows' text contains one of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from skyrl_core.errors import ConfigurationError


class StopStrings:
    """Callable: ids [A, t] → bool [A], True where the decoded text contains a stop string.

    It is asked after every token, so only a tail of each row is decoded: one that holds any match ending with the last
    token. A character is at most four byte-level tokens; sixteen more give the decoder its context.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if any(not text for text in strings):
            raise ConfigurationError("sampling_params.stop holds an empty string: every text would stop at once")
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail = 4 * max(len(text) for text in strings) + 16

    def __call__(self, ids: Tensor) -> Tensor:
        texts = self._tokenizer.batch_decode(ids[:, -self._tail :].tolist(), skip_special_tokens=True)
        found = [any(stop in text for stop in self._strings) for text in texts]
        return torch.tensor(found, dtype=torch.bool, device=ids.device)

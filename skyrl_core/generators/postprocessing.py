"""A response's tokens, and what becomes of them when the environment rewrites the action."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from skyrl_core.data.carriers import FloatArray, IntArray
from skyrl_core.generators.protocol import GenerationOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """token_ids[R], sampled_mask[R] (1 = the policy sampled it), logprobs[R] (0 where it did not) or None."""

    token_ids: IntArray
    sampled_mask: IntArray
    logprobs: FloatArray | None

    @classmethod
    def sampled(cls, output: GenerationOutput) -> Self:
        """The response as the engine sampled it."""
        return cls(token_ids=output.token_ids, sampled_mask=np.ones_like(output.token_ids), logprobs=output.logprobs)


def replace_action(response: Response, action: str, tokenizer: Any) -> Response:
    """The response with `action`, the environment's version of its text, in place of what was sampled.

    The same text keeps every sampled token. A beginning of the text (cut after a tool call, say) keeps the shortest run
    of sampled tokens that decodes to it. Any other text is tokenized; the beginning it shares with the sampled tokens
    stays trained, the rest gets mask 0, because the policy did not sample it. SkyRL trains on all of the new tokens.
    """
    ids = response.token_ids.tolist()
    if action == tokenizer.decode(ids, skip_special_tokens=True):
        return response
    length = _length_of_text(ids, action, tokenizer)
    if length is not None:
        return Response(
            token_ids=response.token_ids[:length],
            sampled_mask=response.sampled_mask[:length],
            logprobs=None if response.logprobs is None else response.logprobs[:length],
        )
    new_ids = np.asarray(tokenizer.encode(action, add_special_tokens=False), dtype=np.int64)
    overlap = min(len(ids), len(new_ids))
    different = np.flatnonzero(response.token_ids[:overlap] != new_ids[:overlap])
    shared = int(different[0]) if len(different) else overlap
    mask = np.zeros_like(new_ids)
    mask[:shared] = response.sampled_mask[:shared]
    logprobs = None
    if response.logprobs is not None:
        logprobs = np.zeros(len(new_ids), dtype=np.float32)
        logprobs[:shared] = response.logprobs[:shared]
    return Response(token_ids=new_ids, sampled_mask=mask, logprobs=logprobs)


def _length_of_text(ids: list[int], text: str, tokenizer: Any) -> int | None:
    """The smallest number of leading tokens that decode to `text`, or None when no number does."""
    # Decoded length grows with the number of tokens: bisect for the first one long enough, then look.
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.decode(ids[:middle], skip_special_tokens=True)) < len(text):
            low = middle + 1
        else:
            high = middle
    return low if tokenizer.decode(ids[:low], skip_special_tokens=True) == text else None

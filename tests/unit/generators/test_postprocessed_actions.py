"""What becomes of sampled tokens when the environment rewrites the action."""

from typing import Any

import numpy as np
import pytest

from skyrl_core.generators.postprocessing import Response, replace_action


def _response(tokenizer: Any, text: str, *, eos: bool = True, logprobs: bool = True) -> Response:
    ids = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if eos else [])
    return Response(
        token_ids=np.array(ids, dtype=np.int64),
        sampled_mask=np.ones(len(ids), dtype=np.int64),
        logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) if logprobs else None,
    )


def test_the_same_text_keeps_every_token_and_the_end_of_turn(tokenizer: Any):
    response = _response(tokenizer, "abc")
    assert replace_action(response, "abc", tokenizer) is response


@pytest.mark.parametrize("kept", ["", "a", "ab"])
def test_a_beginning_keeps_the_sampled_tokens_that_make_it(tokenizer: Any, kept: str):
    response = replace_action(_response(tokenizer, "abc"), kept, tokenizer)
    count = len(kept)
    assert tokenizer.decode(response.token_ids) == kept
    assert response.sampled_mask.tolist() == [1] * count
    assert response.logprobs is not None
    assert response.logprobs.tolist() == [-1.0, -2.0][:count]


def test_another_text_trains_only_on_what_it_shares_with_the_sampled_tokens(tokenizer: Any):
    response = replace_action(_response(tokenizer, "abxyz"), "abc", tokenizer)
    assert tokenizer.decode(response.token_ids) == "abc"
    assert response.sampled_mask.tolist() == [1, 1, 0]
    assert response.logprobs is not None
    assert response.logprobs.tolist() == [-1.0, -2.0, 0.0]


def test_a_longer_text_masks_what_the_environment_added(tokenizer: Any):
    response = replace_action(_response(tokenizer, "ab", eos=False, logprobs=False), "abcd", tokenizer)
    assert response.sampled_mask.tolist() == [1, 1, 0, 0]
    assert response.logprobs is None

"""`generator.sampling_params` and `generator.eval_sampling_params`: how tokens are drawn."""

from typing import Annotated, Any

from pydantic import Field

from skyrl_core.config.section import Count, Items, NonNegative, Positive, Section, Share


class SamplingParams(Section):
    """How an engine draws tokens."""

    max_generate_length: Count = Field(1024, description="longest response, in tokens; for multi-turn: of one turn")
    repetition_penalty: Positive = Field(1.0, description="divides the scores of tokens already seen; 1.0 leaves them")
    temperature: NonNegative = Field(1.0, description="sampling temperature; 0 takes the likeliest token")
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0, description="draw from the smallest set of tokens with this total probability"
    )
    min_p: Share = Field(0.0, description="drop tokens less likely than this share of the likeliest one")
    top_k: Annotated[int, Field(ge=-1)] = Field(-1, description="draw from this many likeliest tokens; -1 from all")
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = Field(
        1, description="return the chosen tokens' log-probabilities: 0 or 1 yes, null no"
    )
    stop: Items[str] | None = Field(None, description="strings that end a response")
    additional_kwargs: dict[str, Any] | None = Field(None, description="further parameters handed to the engine as is")

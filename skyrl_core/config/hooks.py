"""`hooks`: functions of the user's own in place of the factories that build a run (all ours)."""

from typing import Annotated

from pydantic import Field

from skyrl_core.config.section import Section, ours

Hook = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]


class HooksConfig(Section):
    """`hooks`: each null or `module:function`."""

    tokenizer: Hook | None = Field(None, description=ours("module:function that makes the tokenizer"))
    datasets: Hook | None = Field(None, description=ours("module:function that makes the datasets"))
    placement: Hook | None = Field(None, description=ours("module:function that makes the placement groups"))
    inference_client: Hook | None = Field(None, description=ours("module:function that makes the inference client"))
    generator: Hook | None = Field(None, description=ours("module:function that makes the generator"))
    trainer: Hook | None = Field(None, description=ours("module:function that makes the trainer"))
    tracker: Hook | None = Field(None, description=ours("module:function that makes the tracker"))

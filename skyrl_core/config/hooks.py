"""`hooks`: functions of the user's own in place of the factories that build a run (all ours)."""

from pydantic import Field

from skyrl_core.config.section import OwnCode, Section, ours


class HooksConfig(Section):
    """`hooks`: each null, `module:function` or `path/to/file.py:function`."""

    tokenizer: OwnCode | None = Field(None, description=ours("function that makes the tokenizer"))
    datasets: OwnCode | None = Field(None, description=ours("function that makes the datasets"))
    placement: OwnCode | None = Field(None, description=ours("function that makes the placement groups"))
    inference_client: OwnCode | None = Field(None, description=ours("function that makes the inference client"))
    generator: OwnCode | None = Field(None, description=ours("function that makes the generator"))
    trainer: OwnCode | None = Field(None, description=ours("function that makes the trainer"))
    tracker: OwnCode | None = Field(None, description=ours("function that makes the tracker"))

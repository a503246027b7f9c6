"""`data`: which prompts to train and evaluate on."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_core.config.section import Items, PathText, Section, ours


class DataLoaderConfig(Section):
    """`data.dataloader`."""

    num_workers: Annotated[int, Field(ge=0)] | None = Field(
        None, description="processes that load prompts; 0 loads in the main process, null means 8"
    )
    persistent_workers: bool = Field(False, description="keep those processes between epochs")


class DataConfig(Section):
    """`data`."""

    train_data: Items[PathText] = Field(
        ("~/data/gsm8k/train.parquet",),
        description="training data: parquet, json or jsonl files, or Hugging Face names (name:split)",
    )
    val_data: Items[PathText] = Field(
        ("~/data/gsm8k/validation.parquet",), description="evaluation data, in the same forms as train_data"
    )
    dataloader: DataLoaderConfig = Field(DataLoaderConfig(), description="loader of prompts")
    recipe: Literal["arithmetic"] | None = Field(
        None, description=ours("make data and model by this recipe when they are missing")
    )

"""`flow`: how the workflow retries, times out, and shows itself (all ours)."""

from typing import Annotated, Literal

from pydantic import Field

from skyrl_core.config.section import Count, NonNegative, Positive, Section, ours


class StageTimeouts(Section):
    """`flow.stage_timeout_seconds`."""

    generate: Positive = Field(3600.0, description=ours("longest time of one generate stage"))
    score: Positive = Field(3600.0, description=ours("longest time of one score stage"))
    update: Positive = Field(3600.0, description=ours("longest time of one update stage"))
    sync: Positive = Field(600.0, description=ours("longest time of one weight sync"))
    checkpoint: Positive = Field(1800.0, description=ours("longest time of one checkpoint"))
    evaluate: Positive = Field(3600.0, description=ours("longest time of one evaluation"))


class FlowConfig(Section):
    """`flow`."""

    stage_attempts: Count = Field(3, description=ours("tries of a stage that fails for a passing reason"))
    stage_retry_seconds: NonNegative = Field(2.0, description=ours("pause before the first new try; it doubles"))
    stage_timeout_seconds: StageTimeouts = Field(StageTimeouts(), description=ours("longest time of each stage"))
    prefect_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description=ours("port of a Prefect server started by us; 0 for any free one")
    )
    prefect_start_timeout_seconds: Positive = Field(120.0, description=ours("longest wait for that server"))
    ray_num_cpus: Count | None = Field(None, description=ours("CPUs of a Ray started by us; null for what is needed"))
    show: Literal["auto", "live", "plain", "off"] = Field(
        "auto", description=ours("terminal view: live table, plain lines, or nothing; auto looks at the terminal")
    )
    artifact_interval: Count = Field(1, description=ours("steps between updates of the run's page"))
    store_block: str | None = Field(
        None,
        description=ours(
            "Prefect Secret block with the object store's variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …) as a JSON "
            "object; null takes them from the environment"
        ),
    )

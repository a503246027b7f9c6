"""`environment`: what answers the policy and rewards it."""

from typing import Annotated

from pydantic import AfterValidator, Field

from skyrl_core.config.section import Count, PathText, Positive, Section, ours, own_code


def _absolute(name: str) -> str:
    return own_code(name) if ":" in name else name


class Text2SQLConfig(Section):
    """`environment.skyrl_gym.text2sql`."""

    db_path: PathText = Field("/home/ray/default/sql_data", description="folder of the SQLite databases")


class LLMJudgeConfig(Section):
    """`environment.skyrl_gym.llm_as_a_judge`."""

    model: str = Field("gpt-4o-mini", description="model that judges")
    base_url: str | None = Field(None, description="its API's address; null for the client's default")


class SearchConfig(Section):
    """`environment.skyrl_gym.search`."""

    log_requests: bool = Field(False, description="log each request")
    search_url: str = Field("http://127.0.0.1:8000/retrieve", description="address of the retriever")
    topk: Count = Field(3, description="documents per query")
    timeout: Count = Field(30, description="seconds to wait for an answer")


class SkyRLGymConfig(Section):
    """`environment.skyrl_gym`."""

    max_env_workers: Annotated[int, Field(ge=0)] = Field(
        32, description="threads that run environments; 0 runs them in the event loop"
    )
    text2sql: Text2SQLConfig = Field(Text2SQLConfig(), description="text2sql")
    llm_as_a_judge: LLMJudgeConfig = Field(LLMJudgeConfig(), description="llm_as_a_judge")
    search: SearchConfig = Field(SearchConfig(), description="search")


ENVIRONMENT_REWARD = "environment"
"""Stands for the environment's own reward where a reward function is named."""


def _reward_function(name: str) -> str:
    return name if name == ENVIRONMENT_REWARD else own_code(name)


class RewardConfig(Section):
    """One entry of `environment.rewards`."""

    function: Annotated[str, AfterValidator(_reward_function)]
    weight: float = 1.0


class EnvironmentConfig(Section):
    """`environment`."""

    env_class: Annotated[str, AfterValidator(_absolute)] = Field(
        "gsm8k", description="environment of prompts that name none: a name, module:Class or file.py:Class"
    )
    timeout_seconds: Positive = Field(
        300.0, description=ours("longest time one call of an environment may take; then its trajectory fails")
    )
    rewards: dict[str, RewardConfig] = Field(
        {},
        description=ours(
            "reward functions by name, each with function (environment for the environment's own, module:function or "
            "file.py:function) and weight (1); empty: the environment's own reward"
        ),
    )
    skyrl_gym: SkyRLGymConfig = Field(SkyRLGymConfig(), description="parameters of skyrl-gym's environments")

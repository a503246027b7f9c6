"""Configuration: SkyRL's keys and ours, as frozen pydantic models. Imports pydantic and yaml only."""

from skyrl_core.config.root import SkyRLConfig

__all__ = ["SkyRLConfig"]

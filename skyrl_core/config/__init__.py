"""Configuration: SkyRL's keys and ours, as frozen pydantic models. Imports pydantic and yaml only."""

from skyrl_core.config.digest import config_digest, diff_configs
from skyrl_core.config.load import config_from_yaml, dump_yaml, load_config
from skyrl_core.config.root import SkyRLConfig
from skyrl_core.config.schema import KeyInfo, list_keys

__all__ = [
    "KeyInfo",
    "SkyRLConfig",
    "config_digest",
    "config_from_yaml",
    "diff_configs",
    "dump_yaml",
    "list_keys",
    "load_config",
]

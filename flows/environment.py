"""Environment variables that Prefect needs in this process and in Ray workers. Set before Prefect is imported."""

import os

_FORWARDED = ("PREFECT_API_URL", "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "PREFECT_HOME", "PREFECT_PROFILE")

# Log records of a worker's last two seconds are lost with Prefect's default batching.
_LOGGING = {
    "PREFECT_LOGGING_TO_API_BATCH_INTERVAL": "0.2",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "skyrl_core,tasks,flows",
}


def prefect_environment() -> dict[str, str]:
    """Variables for Ray workers: the API this process uses, and how to log to it."""
    from prefect.settings import PREFECT_API_URL

    environment = {name: os.environ[name] for name in _FORWARDED if name in os.environ}
    if url := PREFECT_API_URL.value():
        environment["PREFECT_API_URL"] = url
    return environment | _LOGGING


def prepare_this_process(*, debug: bool) -> None:
    """Quiet the console for the live view, unless debugging: the API keeps every log record."""
    for name, value in _LOGGING.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A server with the zombie automation (deployments/automations.yaml) notices by them that this process was killed.
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")
    if not debug:
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")

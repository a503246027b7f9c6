"""The list of checks."""

import os

from flows.doctor import machine, services, store
from flows.doctor.report import Check
from skyrl_core.config import SkyRLConfig


def all_checks(config: SkyRLConfig) -> list[Check]:
    """Everything that can be known without starting anything, in the order in which it is shown.

    Limits are generous: importing torch, prefect and ray at once takes a while on a small machine.
    """
    requirements, installed = machine.project_requirements(), machine.installed_packages()
    joins = bool(os.environ.get("RAY_ADDRESS"))
    return [
        Check("python", machine.check_python),
        Check("packages", lambda: machine.check_packages(requirements, installed)),
        Check("vllm", lambda: machine.check_vllm(config, requirements, installed)),
        Check("configuration", lambda: store.check_configuration(config)),
        Check("model", lambda: store.check_model(config)),
        Check("data", lambda: store.check_data(config)),
        Check("store", lambda: store.check_run_store(config), 60.0),
        Check("exports", lambda: store.check_store(config.trainer.export_path)),
        Check("trackers", lambda: store.check_tracker(config), 60.0),
        Check("Prefect", services.check_prefect, 60.0),
        Check("database", services.check_database),
        Check("ports", lambda: services.check_ports(config)),
        Check("Ray", lambda: services.check_ray(config), 90.0),
        Check("GPUs", lambda: machine.check_gpus(config, joins_cluster=joins), 60.0),
        Check("shared memory", machine.check_shared_memory),
        Check("disk", lambda: machine.check_disk(config)),
    ]

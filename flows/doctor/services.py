"""Checks of services: the Prefect API and its database, Ray, ports."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from flows.doctor.machine import usable_cpus
from flows.doctor.report import Status
from flows.server import claim_port
from skyrl_core.config import SkyRLConfig

Answer = tuple[Status, str, str]
_HTTP_SECONDS = 8.0
_RAY_SECONDS = 60.0


def check_prefect() -> Answer:
    """The API answers, and server and client are of one version."""
    import prefect
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    url = PREFECT_API_URL.value()
    if not url:
        return "ok", "no PREFECT_API_URL: each start brings a local server (SQLite, for one machine)", ""
    try:
        with get_client(sync_client=True, httpx_settings={"timeout": _HTTP_SECONDS}) as client:
            if (failure := client.api_healthcheck()) is not None:
                raise failure
            version = str(client.api_version())
    except Exception as error:  # whatever the client's layers raise
        advice = "start the server, correct PREFECT_API_URL (and PREFECT_API_AUTH_STRING), or unset it"
        return "fail", f"{url} does not answer: {type(error).__name__}: {error}", advice
    if version != prefect.__version__:
        text = f"{url} is Prefect {version}, this machine has {prefect.__version__}"
        return "warn", text, f"run the server with prefect=={prefect.__version__}"
    return "ok", f"{url}, Prefect {version}", ""


def check_database() -> Answer:
    """Where this machine knows the server's database: it answers, and PostgreSQL has the extension Prefect needs."""
    url = os.environ.get("PREFECT_SERVER_DATABASE_CONNECTION_URL") or os.environ.get(
        "PREFECT_API_DATABASE_CONNECTION_URL"
    )
    if url is None:
        if os.environ.get("PREFECT_API_URL"):
            return "ok", "known to the Prefect server only", ""
        return "ok", "SQLite of the local server: for one machine and a few runs at a time", ""
    if url.startswith("sqlite"):
        return "warn", "SQLite: it locks under the load of a team", "use PostgreSQL"
    try:
        extensions = asyncio.run(_extensions(url.replace("postgresql+asyncpg", "postgresql")))
    except Exception as error:  # asyncpg raises errors of its own, of sockets and of its parser
        return "fail", f"PostgreSQL does not answer: {type(error).__name__}: {error}", "start it, or correct the URL"
    if "pg_trgm" not in extensions:
        return "fail", "PostgreSQL lacks pg_trgm", "CREATE EXTENSION pg_trgm (package postgresql-contrib)"
    return "ok", "PostgreSQL with pg_trgm", ""


async def _extensions(url: str) -> set[str]:
    import asyncpg

    connection = await asyncpg.connect(url, timeout=_HTTP_SECONDS)
    try:
        return {row["extname"] for row in await connection.fetch("SELECT extname FROM pg_extension")}
    finally:
        await connection.close()


def check_ports(config: SkyRLConfig) -> Answer:
    """The port that a local Prefect server would take is free. Raises ConfigurationError when it is not."""
    port = config.flow.prefect_port
    if os.environ.get("PREFECT_API_URL"):
        return "ok", "none needed: PREFECT_API_URL is set", ""
    if port == 0:
        return "ok", "any free one", ""
    claim_port(port)
    return "ok", f"{port} is free", ""


# Run by a process of its own: a cluster that hangs, or that is of another version, cannot hold or end the doctor.
_PROBE = """
import json, logging, os, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
alive = [node for node in ray.nodes() if node["Alive"]]
print("\\n" + json.dumps({
    "total": ray.cluster_resources(), "free": ray.available_resources(),
    "nodes": len(alive), "version": ray.__version__,
}))
sys.stdout.flush()
os._exit(0)
"""


def check_ray(config: SkyRLConfig) -> Answer:
    """Ray is reachable, or can be started here, and has what the configuration's placement asks for."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return _judge_local(config)
    advice = "start it (`ray start --head`), correct RAY_ADDRESS, or unset it to use a local one"
    words = [sys.executable, "-c", _PROBE, address]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_RAY_SECONDS)
    except subprocess.TimeoutExpired:
        return "fail", f"RAY_ADDRESS={address} does not answer within {_RAY_SECONDS:g} s", advice
    if answer.returncode != 0:
        if "AuthToken" in answer.stderr:
            advice = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
            return "fail", f"RAY_ADDRESS={address} refused this process's token", advice
        lines = answer.stderr.strip().splitlines() or ["it ended without a word"]
        return "fail", f"RAY_ADDRESS={address} cannot be joined: {lines[-1][:300]}", advice
    return judge_cluster(config, address, json.loads(answer.stdout.strip().splitlines()[-1]))


def judge_cluster(config: SkyRLConfig, address: str, cluster: Mapping[str, Any]) -> Answer:
    """`cluster` has `total` and `free` resources, the number of `nodes`, and Ray's `version`."""
    from skyrl_core.runtime.placement import resources_needed

    total, free = cluster["total"], cluster["free"]
    device = config.trainer.placement.device
    if device == "auto":
        device = "cuda" if total.get("GPU", 0) > 0 else "cpu"
    wanted = resources_needed(config, device)
    text = f"{address}: {cluster['nodes']} node(s), Ray {cluster['version']}, " + _compare(wanted, total, free)
    advice = "ask for fewer ranks (trainer.placement.*, generator.inference_engine.num_engines) or add nodes"
    if any(total.get(name, 0) < count for name, count in wanted.items()):
        return "fail", text, advice
    if any(free.get(name, 0) < count for name, count in wanted.items()):
        return "warn", text, "others hold the rest: a start waits for trainer.placement.timeout_seconds"
    return "ok", text, ""


def _judge_local(config: SkyRLConfig) -> Answer:
    import torch

    from skyrl_core.runtime.placement import resources_needed

    device = config.trainer.placement.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = resources_needed(config, device)
    has = {"CPU": float(config.flow.ray_num_cpus or usable_cpus()), "GPU": float(torch.cuda.device_count())}
    text = "no RAY_ADDRESS: each start brings a local Ray; " + _compare(wanted, has, has)
    if any(has[name] < count for name, count in wanted.items()):
        advice = "ask for fewer ranks, raise flow.ray_num_cpus (ranks then share CPUs), or set RAY_ADDRESS"
        return "fail", text, advice
    return "ok", text, ""


def _compare(wanted: Mapping[str, float], total: Mapping[str, float], free: Mapping[str, float]) -> str:
    parts = []
    for name, count in sorted(wanted.items()):
        part = f"{name}: {count:g} of {total.get(name, 0):g} asked for"
        parts.append(part if free == total else f"{part}, {free.get(name, 0):g} free")
    return "; ".join(parts)

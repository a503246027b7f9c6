"""What the doctor says of Prefect's API and database, of Ray, and of ports."""

import socket
from pathlib import Path

import pytest

from flows.doctor import services
from skyrl_core.config import load_config
from skyrl_core.errors import ConfigurationError

TWO_AND_ONE = ["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=2"]
TWO_AND_ONE += ["trainer.placement.ref_num_gpus_per_node=2", "trainer.placement.device=cpu"]


def cluster(cpus: float, free: float, **gpus: float) -> dict[str, object]:
    return {"total": {"CPU": cpus, **gpus}, "free": {"CPU": free, **gpus}, "nodes": 2, "version": "2.60.0"}


def test_placement_is_compared_with_what_the_cluster_has_and_what_is_free() -> None:
    config = load_config(None, TWO_AND_ONE)
    # Two ranks and one engine.
    status, message, _ = services.judge_cluster(config, "h:1", cluster(4, 4))
    assert (status, message) == ("ok", "h:1: 2 node(s), Ray 2.60.0, CPU: 3 of 4 asked for")
    status, message, advice = services.judge_cluster(config, "h:1", cluster(4, 1))
    assert (status, message) == ("warn", "h:1: 2 node(s), Ray 2.60.0, CPU: 3 of 4 asked for, 1 free")
    assert "trainer.placement.timeout_seconds" in advice
    status, message, advice = services.judge_cluster(config, "h:1", cluster(2, 2))
    assert (status, message) == ("fail", "h:1: 2 node(s), Ray 2.60.0, CPU: 3 of 2 asked for")
    assert "num_engines" in advice


def test_a_cluster_with_gpus_is_asked_for_gpus() -> None:
    config = load_config(None, [word for word in TWO_AND_ONE if "device" not in word])
    status, message, _ = services.judge_cluster(config, "h:1", cluster(8, 8, GPU=2))
    assert status == "fail"
    assert "CPU: 3 of 8 asked for; GPU: 3 of 2 asked for" in message


def test_a_local_ray_is_judged_by_the_cpus_it_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    status, message, _ = services.check_ray(load_config(None, [*TWO_AND_ONE, "flow.ray_num_cpus=2"]))
    assert (status, message) == (
        "fail",
        "no RAY_ADDRESS: each start brings a local Ray; CPU: 3 of 2 asked for",
    )
    assert services.check_ray(load_config(None, [*TWO_AND_ONE, "flow.ray_num_cpus=3"]))[0] == "ok"


def test_without_an_address_prefect_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert services.check_prefect()[:2] == (
            "ok",
            "no PREFECT_API_URL: each start brings a local server (SQLite, for one machine)",
        )


def test_an_api_that_is_not_there_is_named() -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        status, message, advice = services.check_prefect()
    assert status == "fail"
    assert message.startswith("http://127.0.0.1:9/api does not answer: ")
    assert "PREFECT_API_URL" in advice


@pytest.mark.parametrize(
    ("url", "status", "message"),
    [
        (None, "ok", "known to the Prefect server only"),
        ("sqlite+aiosqlite:////tmp/prefect.db", "warn", "SQLite"),
        ("postgresql+asyncpg://prefect@127.0.0.1:9/prefect", "fail", "PostgreSQL does not answer"),
    ],
)
def test_database(url: str | None, status: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    monkeypatch.delenv("PREFECT_API_DATABASE_CONNECTION_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", url)
    found = services.check_database()
    assert found[0] == status
    assert message in found[1]


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"flow\.prefect_port={port} cannot be used"):
            services.check_ports(load_config(None, [f"flow.prefect_port={port}"]))
    assert services.check_ports(load_config(None, [f"flow.prefect_port={port}"]))[:2] == ("ok", f"{port} is free")
    assert services.check_ports(load_config(None, []))[1] == "any free one"

"""Bad input: one clear line, the right exit code, no traceback, and nothing of an earlier run touched."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import RUN, Project, wait_until


def refuse(project: Project, *words: str, code: int, command: str = "train") -> str:
    """Run what must fail; returns what it printed."""
    process = project.start(*words, command=command)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == code, output
    assert "Traceback" not in output
    assert sum(line.startswith("error: ") for line in output.splitlines()) == 1, output
    return output


def test_an_unknown_key_names_the_nearest_before_heavy_imports(project: Project) -> None:
    program = (
        "import sys\nfrom flows.cli import main\n"
        f"code = main(['train', '--config', {str(project.config)!r}, 'trainer.epohcs=2'])\n"
        "heavy = [name for name in ('torch', 'ray', 'prefect', 'transformers') if name in sys.modules]\n"
        "print('code', code, 'heavy', heavy)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=project.environment, timeout=120
    )
    assert "trainer.epochs" in found.stderr
    assert "code 2 heavy []" in found.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.epohcs=2"], "trainer.epochs"),
        (["trainer.epochs=two"], "trainer.epochs"),
        (["trainer.strategy=megatron"], "not available yet"),
        (["data.train_data=[nowhere.parquet]"], "nowhere.parquet does not exist"),
        (["trainer.policy.model.path=./digit_env"], "digit_env"),
        (["trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64"], "14"),
        (["environment.env_class=arithmetics"], "arithmetic"),
        (["trainer.resume_mode=from_path", "trainer.resume_path=./nowhere"], "nowhere"),
    ],
    ids=[
        "unknown key",
        "wrong type",
        "unavailable",
        "missing file",
        "no model",
        "too few rows",
        "environment",
        "resume",
    ],
)
def test_configuration_and_data_errors_exit_with_2(project: Project, words: list[str], message: str) -> None:
    code = 1 if message == "nowhere" else 2
    assert message in refuse(project, *words, code=code)
    assert not (project.root / "exports").exists() or not list((project.root / "exports").glob("*/metrics.jsonl"))


def test_an_empty_file_is_a_dataset_error(project: Project) -> None:
    empty = project.root / "empty.jsonl"
    empty.touch()
    assert "has no rows" in refuse(project, f"data.train_data=[{empty}]", code=2)


def test_a_model_folder_without_weights_is_refused_before_anything_starts(project: Project) -> None:
    for weights in (project.root / "model").glob("*.safetensors"):
        weights.unlink()
    output = refuse(project, code=2)
    assert "model" in output
    assert "Prefect" not in output


def test_an_unreachable_prefect_api_is_said_at_once(project: Project) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    project.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    assert "PREFECT_API_URL" in refuse(project, code=1)


def test_a_busy_port_is_named(project: Project, tmp_path: Path) -> None:
    project.environment |= {"PREFECT_API_URL": "", "PREFECT_HOME": str(tmp_path)}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"flow.prefect_port={port}" in refuse(project, f"flow.prefect_port={port}", code=2)


def test_an_unreachable_ray_is_said(project: Project) -> None:
    project.environment["RAY_ADDRESS"] = "127.0.0.1:1"
    assert "RAY_ADDRESS" in refuse(project, code=1)


def test_another_configuration_under_the_same_name_is_refused_and_nothing_is_touched(uninterrupted: Project) -> None:
    def state() -> dict[str, int]:
        folders = (uninterrupted.root / "checkpoints" / "k", uninterrupted.root / "exports" / "k")
        return {
            str(path): path.stat().st_mtime_ns
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file() and "lease" not in path.parts
        }

    before = state()
    output = refuse(uninterrupted, RUN, "generator.n_samples_per_prompt=2", code=2)
    assert "generator.n_samples_per_prompt: was 4, now 2" in output
    assert state() == before


def test_changed_data_under_the_same_name_is_refused(uninterrupted: Project, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(uninterrupted.root / "train.parquet")
    changed = tmp_path / "train.parquet"
    pq.write_table(rows.slice(0, 13), changed)
    original = (uninterrupted.root / "train.parquet").read_bytes()
    try:
        (uninterrupted.root / "train.parquet").write_bytes(changed.read_bytes())
        assert "trainer.allow_changed_data" in refuse(uninterrupted, RUN, "trainer.epochs=3", code=2)
    finally:
        (uninterrupted.root / "train.parquet").write_bytes(original)


def test_a_second_process_on_the_same_run_is_refused_while_the_first_goes_on(project: Project) -> None:
    first = project.start(RUN)
    wait_until(lambda: (project.root / "checkpoints" / "k" / "run.json").exists(), first)
    output = refuse(project, RUN, code=1)
    assert f"process {first.pid}" in output
    rest, _ = first.communicate(timeout=900)
    assert first.returncode == 0, rest


def test_resume_mode_none_does_not_overwrite_a_run(uninterrupted: Project) -> None:
    output = refuse(uninterrupted, RUN, "trainer.resume_mode=none", code=2)
    assert "trainer.run_name" in output


def test_a_failing_worker_s_type_and_message_reach_the_user_and_the_tracker(project: Project) -> None:
    output = refuse(project, RUN, "generator.sampling_params.max_generate_length=600", code=1)
    assert "positions" in output
    events = list((project.root / "exports" / "k").rglob("events.out.tfevents.*"))
    assert any(b"positions" in path.read_bytes() for path in events)


def test_an_environment_flag_of_skyrl_names_the_key_that_replaces_it(project: Project) -> None:
    project.environment["SKYRL_RAY_PG_TIMEOUT_IN_S"] = "30"
    assert "trainer.placement.timeout_seconds" in refuse(project, code=2)

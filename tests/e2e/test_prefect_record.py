"""What the Prefect API knows of a run: setup as a chain, epochs as subflows, stages on Ray, and no token ids."""

import itertools
import json
import re
from collections.abc import Iterator

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.objects import FlowRun, TaskRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.e2e.conftest import LAST_STEP, Project

SETUP = ["load tokenizer", "load datasets", "reserve placement", "start inference client", "build generator"]
SETUP += ["start trainer"]


@pytest.fixture(scope="module")
def client(prefect_api: str) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: prefect_api}), get_client(sync_client=True) as found:
        yield found


def flow_runs(client: SyncPrefectClient, name: str) -> list[FlowRun]:
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[name])))


def task_runs(client: SyncPrefectClient, run: FlowRun) -> list[TaskRun]:
    found = client.request(
        "POST", "/task_runs/filter", json={"flow_runs": {"id": {"any_": [str(run.id)]}}, "limit": 200}
    )
    return [TaskRun.model_validate(item) for item in found.json()]


def train_run(client: SyncPrefectClient, project: Project) -> FlowRun:
    mine = [run for run in flow_runs(client, "k") if str(project.config) in str(run.parameters)]
    return min(mine, key=lambda run: run.created)


def test_setup_is_a_chain_of_tasks(client: SyncPrefectClient, uninterrupted: Project) -> None:
    runs = {run.name: run for run in task_runs(client, train_run(client, uninterrupted))}
    assert [name for name in SETUP if name not in runs] == []
    for before, after in itertools.pairwise(SETUP):
        inputs = {found.id for found in _task_inputs(runs[after])}
        assert runs[before].id in inputs, f"{after} does not record {before} as its input"
    assert all(runs[name].state_name == "Completed" for name in SETUP)


def _task_inputs(run: TaskRun) -> list[object]:
    return [found for inputs in run.task_inputs.values() for found in inputs if found.input_type == "task_run"]


def test_epochs_are_subflows_with_every_stage_by_name(client: SyncPrefectClient, uninterrupted: Project) -> None:
    parent = train_run(client, uninterrupted)
    children = {run.parent_task_run_id for name in ("k epoch 1", "k epoch 2") for run in flow_runs(client, name)}
    assert {run.id for run in task_runs(client, parent)} & children
    names: list[str] = []
    for epoch in ("k epoch 1", "k epoch 2"):
        mine = min(flow_runs(client, epoch), key=lambda run: run.created)
        names += [run.name for run in task_runs(client, mine)]
    for step in range(1, LAST_STEP + 1):
        for stage in ("generate", "score", "update", "sync"):
            assert names.count(f"{stage} step {step}") == 1
    assert [name for name in names if name.startswith("checkpoint")]
    assert f"evaluate step {LAST_STEP}" in names


def test_stages_ran_in_other_processes_than_the_flow(client: SyncPrefectClient, uninterrupted: Project) -> None:
    epoch = min(flow_runs(client, "k epoch 1"), key=lambda run: run.created)
    logs = client.read_logs(log_filter=LogFilter(flow_run_id=LogFilterFlowRunId(any_=[epoch.id])), limit=200)
    workers = {found[1] for log in logs if (found := re.search(r" in process (\d+), parent", log.message))}
    assert workers
    flow_pid = str(uninterrupted.processes[0].pid)
    assert flow_pid not in workers


def test_no_parameter_or_result_holds_token_ids(client: SyncPrefectClient, uninterrupted: Project) -> None:
    runs = [train_run(client, uninterrupted), *flow_runs(client, "k epoch 1"), *flow_runs(client, "k epoch 2")]
    for run in runs:
        assert len(json.dumps(run.parameters)) < 2_000
        for found in task_runs(client, run):
            assert len(found.model_dump_json()) < 20_000
            assert found.state is not None
            assert "input_ids" not in found.model_dump_json()


def test_the_run_s_page_has_progress_and_a_picture_of_the_curves(
    client: SyncPrefectClient, uninterrupted: Project
) -> None:
    run = train_run(client, uninterrupted)
    artifacts = client.request(
        "POST", "/artifacts/filter", json={"flow_runs": {"id": {"any_": [str(run.id)]}}, "limit": 50}
    ).json()
    kinds = {found["type"]: found for found in artifacts}
    assert kinds["progress"]["data"] == 100.0
    assert "data:image/png;base64," in kinds["markdown"]["data"]

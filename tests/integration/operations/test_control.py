"""What operators do and what goes wrong: cancel, hung stages, killed machines, wrong parameters, low scores."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName, TaskRunFilter, TaskRunFilterName
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling

from tests.integration.operations.conftest import Team, end, wait_for

pytestmark = pytest.mark.service
TRAIN = "train/train"
FREED_WITHIN_SECONDS = 30.0


def test_a_cancel_frees_every_actor_and_process(new_team: Callable[..., Team]) -> None:
    team = new_team("cancel")
    team.deploy()
    worker = team.worker("training", faults="generate.begin@step=2:hang")
    run = team.start(TRAIN, overrides=["trainer.run_name=c"])
    wait_for(lambda: (team.root / "faults" / "fault-0.fired").exists(), "the hanging stage")
    below = psutil.Process(worker.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in below)
    team.client.set_flow_run_state(run.id, Cancelling(), force=True)
    wait_for(lambda: not any(map(alive, below)), "the end of every process", FREED_WITHIN_SECONDS)
    wait_for(lambda: team.state(run) == "Cancelled", "the cancelled state")
    # Its name and its store are free: the next start goes on with the recorded batches.
    again = team.ended(team.start(TRAIN, overrides=["trainer.run_name=c", "trainer.max_training_steps=2"]))
    assert again.state is not None
    assert again.state.is_completed(), again.state.message


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_hung_stage_is_stopped_by_its_limit_and_tried_again(new_team: Callable[..., Team]) -> None:
    team = new_team("hang")
    team.deploy()
    team.worker("training", faults="generate.begin@step=2:hang")
    words = ["trainer.run_name=h", "trainer.max_training_steps=2", "flow.stage_timeout_seconds.generate=60"]
    run = team.ended(team.start(TRAIN, overrides=words))
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    names = TaskRunFilterName(any_=["generate step 2", "generate step 2 (attempt 2)"])
    epoch = FlowRunFilter(name=FlowRunFilterName(any_=["h epoch 1"]))
    tried = team.client.read_task_runs(task_run_filter=TaskRunFilter(name=names), flow_run_filter=epoch)
    states = {task.name: (task.state_name, task.state.message if task.state else "") for task in tried}
    assert states["generate step 2"] == ("Crashed", "stopped after 60 s")
    assert states["generate step 2 (attempt 2)"][0] == "Completed"


def test_a_machine_that_dies_leaves_a_crashed_run_and_a_free_slot(new_team: Callable[..., Team]) -> None:
    team = new_team("zombie")
    team.deploy()
    worker = team.worker("training", faults="generate.begin@step=2:hang")
    words = ["trainer.max_training_steps=2"]
    run = team.start("nightly/nightly-train", overrides=words)
    wait_for(lambda: (team.root / "faults" / "fault-0.fired").exists(), "the hanging stage")
    for process in [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # Ray ends some of its own once their parent is gone.
            process.kill()
    assert team.state(run) == "Running"
    crashed = team.ended(run, timeout=400.0)
    assert crashed.state is not None
    assert crashed.state.is_crashed()
    assert "heartbeat" in str(crashed.state.message)
    team.worker("training")
    following = team.ended(team.start("nightly/nightly-train", overrides=words))
    assert following.state is not None
    assert following.state.is_completed(), following.state.message
    wait_for(lambda: not _running(team), "the end of the dead machine's subflows")


def _running(team: Team) -> list[str]:
    found = team.client.read_flow_runs(flow_run_filter=FlowRunFilter(state={"type": {"any_": ["RUNNING"]}}))
    return [run.name for run in found if run.name.startswith("nightly-")]


def test_wrong_parameters_are_refused_with_the_reason(new_team: Callable[..., Team]) -> None:
    team = new_team("wrong")
    team.deploy()
    with pytest.raises(PrefectHTTPStatusError) as refused:
        team.start(TRAIN, overrides=["trainer.epochs 2"])
    assert "trainer.epochs 2" in refused.value.response.text
    team.worker("training")
    run = team.ended(team.start(TRAIN, overrides=["trainer.epohcs=2"]))
    assert run.state is not None
    assert run.state.is_failed()
    assert "trainer.epohcs" in str(run.state.message)
    assert "trainer.epochs" in str(run.state.message)


def test_low_scores_and_failures_are_told(new_team: Callable[..., Team], received: list[str], address: str) -> None:
    team = new_team("notify")
    block = CustomWebhookNotificationBlock(
        name="receiver", url=address, method="POST", json_data={"text": "{{subject}} | {{body}}"}
    )
    block.save("receiver", overwrite=True, client=None)  # type: ignore[call-overload]
    team.deploy()
    team.command("deploy", "--pool", team.pool, "--notify", f"{block.get_block_type_slug()}/receiver")
    team.worker("training")
    evaluator = team.worker("evaluation")
    done = team.ended(team.start(TRAIN, overrides=["trainer.run_name=n", "trainer.max_training_steps=2"]))
    assert done.state is not None
    assert done.state.is_completed(), done.state.message
    path = str(team.checkpoints / "n" / "global_step_2")
    low = team.ended(team.start("evaluate-checkpoint/evaluate-checkpoint", path=path, step=2, run="n", min_score=0.99))
    assert low.state is not None
    assert low.state.is_completed(), low.state.message
    wait_for(lambda: any("n step 2 scored" in text and "below 0.99" in text for text in received), "the message")
    failed = team.ended(team.start(TRAIN, overrides=["trainer.epohcs=2"]))
    assert failed.state is not None
    wait_for(lambda: any("trainer.epohcs" in text for text in received), "the failure's message")
    end(evaluator)


@pytest.fixture
def received() -> list[str]:
    return []


@pytest.fixture
def address(received: list[str]) -> Iterator[str]:
    """A webhook of ours; what it gets lies in `received`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""The run store and checkpoints on a real S3 server: what a writer leaves, who may write, and what an outage does."""

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import s3fs

from skyrl_core.checkpoint.discovery import list_checkpoints
from skyrl_core.checkpoint.publish import CheckpointWriter
from skyrl_core.checkpoint.retention import apply_retention
from skyrl_core.data.lease import Lease
from skyrl_core.data.object_storage import ObjectStorage
from skyrl_core.data.run_store import RunStore
from skyrl_core.errors import LeaseLostError, RunBusyError, StoreError
from tests.integration.operations.stack.conftest import S3
from tests.integration.operations.stack.services import Proxy, s3_filesystem
from tests.unit.checkpoint import test_checkpoint_object_store as checkpoint_kills
from tests.unit.store import test_run_store_kills as store_kills

pytestmark = pytest.mark.service


def new_root() -> str:
    return f"s3://team/{uuid.uuid4().hex}/run"


@pytest.fixture(autouse=True)
def credentials(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process reaches the server as a run would: by its environment alone."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def proxy(s3_stack: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The endpoint is a proxy that can spoil connections."""
    made = Proxy(s3_stack.environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
    yield made
    made.close()


@pytest.mark.parametrize(
    "behaviour",
    [
        checkpoint_kills.test_a_save_killed_anywhere_leaves_the_old_one_newest_or_the_new_one_whole,
        checkpoint_kills.test_a_replacement_killed_anywhere_never_leaves_the_step_without_a_checkpoint,
        checkpoint_kills.test_a_deletion_killed_anywhere_never_shows_a_half_deleted_checkpoint,
        checkpoint_kills.test_the_writer_that_was_superseded_publishes_nothing,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_checkpoints(behaviour: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_kills, "new_root", new_root)
    behaviour()


@pytest.mark.parametrize(
    "behaviour",
    [
        store_kills.test_a_first_commit_killed_anywhere_is_whole_or_not_done,
        store_kills.test_a_commit_over_other_inputs_killed_anywhere_leaves_the_old_or_the_new_record,
        store_kills.test_pruning_killed_anywhere_keeps_every_metric_and_every_later_file,
        store_kills.test_dropping_killed_anywhere_leaves_no_gap_and_nothing_half,
    ],
    ids=lambda behaviour: behaviour.__name__.removeprefix("test_"),
)
def test_stages(behaviour: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_kills, "new_root", new_root)
    behaviour(tmp_path, kind="object")


def test_of_many_that_create_one_object_exactly_one_wins() -> None:
    storage = ObjectStorage(new_root())
    contents = [f"writer {number}".encode() for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda content: storage.create("token", content), contents))
    assert won.count(True) == 1
    assert storage.read("token") == contents[won.index(True)]


HOLDER = """
import os, sys, signal
from skyrl_core.data.lease import Lease
from skyrl_core.data.run_store import RunStore
lease = Lease.acquire(sys.argv[1], {"flow_run_id": "first"})
RunStore.open(sys.argv[1], fence=lease.token).write_json("run.json", {"by": "first"})
print(lease.token, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_living_writer_is_respected_a_killed_one_superseded_and_its_fence_closed() -> None:
    root = new_root()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() == "1"
    with pytest.raises(RunBusyError, match=rf"{root} is being written by process {holder.pid}.*flow_run_id first"):
        Lease.acquire(root)
    holder.stdin.close()
    assert holder.wait(60) == -9
    late = RunStore.open(root, fence=1)
    with Lease.acquire(root) as lease:
        assert lease.token == 2
        assert lease.previous is not None
        assert lease.previous.pid == holder.pid
        with pytest.raises(LeaseLostError, match="token 2, this process holds 1"):
            late.write_json("run.json", {"by": "late"})
        store = RunStore.open(root, fence=lease.token)
        assert store.read_json("run.json") == {"by": "first"}


def save(root: str, step: int) -> None:
    writer = CheckpointWriter(root, step)
    ObjectStorage(writer.directory).write("policy/weights", f"weights {step}".encode())
    writer.commit(policy_version=step, **checkpoint_kills.FACTS)


def test_another_process_sees_what_retention_left_at_once() -> None:
    root = new_root()
    for step in (1, 2, 3, 4):
        save(root, step)
    assert [found.step for found in list_checkpoints(root, verify="full")] == [1, 2, 3, 4]
    assert apply_retention(root, 1, pinned=[2]) == [1, 3]
    program = (
        "import sys; from skyrl_core.checkpoint.discovery import list_checkpoints;"
        "print([found.step for found in list_checkpoints(sys.argv[1], verify='full')])"
    )
    seen = subprocess.run([sys.executable, "-c", program, root], capture_output=True, text=True, timeout=120)
    assert seen.stdout.strip() == "[2, 4]", seen.stderr
    assert [found.step for found in list_checkpoints(root)] == [2, 4]


@pytest.mark.parametrize(
    "faults",
    [["throttle"] * 7, ["refuse"] * 7, ["throttle", "refuse", "cut"] * 3],
    ids=["it throttles", "it hangs up", "both, and cut in the middle"],
)
def test_a_store_that_is_away_for_a_moment_delays_and_spoils_nothing(proxy: Proxy, faults: list[str]) -> None:
    root, content = new_root(), bytes(range(256)) * 4096
    with Lease.acquire(root) as lease:
        store = RunStore.open(root, fence=lease.token)
        proxy.plan(*faults)
        record = store.write_stage("score", 1, "i", files={"batch": content}, summary={}, seconds=0.0)
        assert proxy.left == 0
        proxy.plan(*faults)
        assert store.read_file(record, "batch") == content
        proxy.plan(*faults)
        assert store.find_stage("score", 1, "i") == store.read_stage("score", 1)
        assert lease.token == 1
    assert ObjectStorage(root).files("stages/step_000001/score") == sorted(
        ["record.json", *(entry.path for entry in record.files)]
    )


def test_a_create_whose_answer_was_lost_is_recognised_as_its_own(
    proxy: Proxy, s3_stack: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(new_root())
    monkeypatch.setattr(ObjectStorage, "patience_seconds", 10.0)
    put_new = storage._effects.put_new
    calls: list[str] = []

    def answer_lost_once(path: str, data: bytes) -> None:
        put_new(path, data)
        calls.append(path)
        if len(calls) == 1:
            raise ConnectionResetError("connection reset by peer")

    monkeypatch.setattr(storage._effects, "put_new", answer_lost_once)
    assert storage.create("token", b"mine") is True
    assert storage.create("token", b"another's") is False
    assert storage.read("token") == b"mine"


def test_an_upload_that_never_gets_through_leaves_the_former_object_whole(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(new_root())
    storage.publish("file", b"former")
    monkeypatch.setattr(ObjectStorage, "patience_seconds", 1.0)
    s3fs.S3FileSystem.clear_instance_cache()
    proxy.plan(*["cut"] * 200)
    with pytest.raises(OSError, match=r"(?i)connection"):
        ObjectStorage(storage.uri).publish("file", b"new" * 1_000_000)
    proxy.plan()
    assert ObjectStorage(storage.uri).read("file") == b"former"


def test_a_store_that_stays_away_is_one_error_that_names_it(
    s3_stack: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_root()
    monkeypatch.setattr(ObjectStorage, "patience_seconds", 1.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=rf"the lease of the run at {root} cannot be taken: .*127\.0\.0\.1:9"):
        Lease.acquire(root)
    assert caplog.text.count("trying again for up to 1 s") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "(?i)signature"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "(?i)access key"),
    ],
)
def test_refused_credentials_are_an_error_at_once_that_shows_none(
    proxy: Proxy, change: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, s3_server: dict[str, str]
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=message) as caught:
        Lease.acquire(new_root())
    assert proxy.connections <= 2
    assert s3_server["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_a_bucket_that_this_user_may_not_use_is_named() -> None:
    with pytest.raises(StoreError, match=r"s3://another-teams/run cannot be taken: .*(?i:access denied)"):
        Lease.acquire("s3://another-teams/run")


def test_credentials_are_neither_pickled_nor_shown(s3_server: dict[str, str]) -> None:
    import pickle

    root = new_root()
    with Lease.acquire(root) as lease:
        store = RunStore.open(root, fence=lease.token)
        store.write_json("run.json", {})
        for text in (pickle.dumps(store), repr(store).encode(), repr(vars(store)).encode()):
            assert s3_server["AWS_SECRET_ACCESS_KEY"].encode() not in text
        copy: Any = pickle.loads(pickle.dumps(store))  # noqa: S301 - our own bytes
        assert copy.read_json("run.json") == {}
    names = s3_filesystem(s3_server).find(root)
    assert all(s3_server["AWS_SECRET_ACCESS_KEY"].encode() not in s3_filesystem(s3_server).cat_file(n) for n in names)

"""Artifacts on the run's page: what they say, and how the Prefect API is asked for them."""

import base64
import json
import math
import pickle
import re
from collections.abc import Callable
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient

from skyrl_core.errors import RewardError
from skyrl_core.tracking.metrics_file import MetricsLine
from tasks import artifacts
from tasks.artifacts import RunArtifacts, artifact_key, dashboard_markdown, failure_markdown

FLOW_RUN = UUID("00000000-0000-0000-0000-00000000000f")


def line(step: int, epoch: int = 1, **extra: float) -> MetricsLine:
    metrics = {"reward/avg_raw_reward": step / 8, "timing/generate": 2.0, "timing/update": 1.0}
    return MetricsLine(step=step, epoch=epoch, metrics=metrics | extra)


class FakeApi:
    """Answers the artifact routes of Prefect's API and keeps what was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, object]]] = []
        self.broken = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            raise httpx.ConnectError("connection refused", request=request)
        if request.url.path == "/api/csrf-token":
            return httpx.Response(422, json={"detail": "CSRF protection is disabled."})
        content = json.loads(request.content)
        self.requests.append((request.method, request.url.path, content))
        if request.method == "POST":
            return httpx.Response(201, json=content | {"id": str(uuid4())})
        return httpx.Response(204)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()

    def client(*, sync_client: bool) -> SyncPrefectClient:
        assert sync_client
        return SyncPrefectClient(api="http://api.test/api", httpx_settings={"transport": httpx.MockTransport(fake)})

    monkeypatch.setattr(artifacts, "get_client", client)
    monkeypatch.setattr(artifacts, "get_task_and_flow_run_ids", lambda: (None, FLOW_RUN))
    monkeypatch.setattr(SyncPrefectClient, "raise_for_api_version_mismatch", lambda self: None)
    monkeypatch.setattr("prefect.events.utilities.emit_event", lambda **_: None)
    return fake


def test_an_artifact_is_made_once_and_then_updated_in_place(api: FakeApi) -> None:
    page = RunArtifacts("Night_1")
    for step in (1, 2, 3):
        page.publish_progress(step, 8)
    (method, path, made), *updates = api.requests
    assert (method, path) == ("POST", "/api/artifacts/")
    assert (made["key"], made["type"], made["data"]) == ("progress-night-1", "progress", 12.5)
    assert made["flow_run_id"] == str(FLOW_RUN)
    assert [(method, content["data"]) for method, _, content in updates] == [("PATCH", 25.0), ("PATCH", 37.5)]
    assert len({path for _, path, _ in updates}) == 1
    assert updates[-1][2]["description"] == "Night_1: step 3 of 8"


def test_each_kind_is_an_artifact_of_its_own(api: FakeApi) -> None:
    page = RunArtifacts("r")
    page.publish_progress(1, 2)
    page.publish_curves([line(1)])
    page.publish_failure("update", 1, ValueError("x"), "Trying again.")
    assert [(method, content["key"], content["type"]) for method, _, content in api.requests] == [
        ("POST", "progress-r", "progress"),
        ("POST", "dashboard-r", "markdown"),
        ("POST", "failure-r", "markdown"),
    ]


@pytest.mark.parametrize(
    "publish",
    [
        lambda page: page.publish_progress(1, 2),
        lambda page: page.publish_curves([line(1)]),
        lambda page: page.publish_failure("update", 1, ValueError("x"), "Trying again."),
    ],
)
def test_an_api_that_does_not_answer_costs_a_warning(
    api: FakeApi, publish: Callable[[RunArtifacts], None], caplog: pytest.LogCaptureFixture
) -> None:
    api.broken = True
    page = RunArtifacts("r")
    publish(page)
    assert "was not published: ConnectError: connection refused" in caplog.text
    api.broken = False
    publish(page)
    assert [method for method, _, _ in api.requests] == ["POST"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("arithmetic", "progress-arithmetic"),
        ("Night.1_b--", "progress-night-1-b"),
        ("été", "progress-t"),
        ("_", "progress-run"),
    ],
)
def test_keys_are_lowercase_letters_digits_and_dashes(name: str, key: str) -> None:
    assert artifact_key("progress", name) == key


def test_the_dashboard_embeds_the_picture_and_lists_steps_times_and_places() -> None:
    lines = [line(0, 0, **{"eval/all/avg_score": 0.25}), *(line(step) for step in range(1, 21))]
    text = dashboard_markdown("night-1", lines, {"metrics": "/data/m.jsonl", "wandb": "https://wandb.ai/x"})
    picture = re.search(r"!\[[^\]]+\]\(data:image/png;base64,([A-Za-z0-9+/=]+)\)", text)
    assert picture is not None
    assert base64.b64decode(picture[1]).startswith(b"\x89PNG\r\n\x1a\n")
    assert "| step | epoch | reward | seconds |" not in text  # no timing/step, no column
    assert "| step | epoch | reward |\n| --- | ---: | ---: |\n| 20 | 1 | 2.500 |\n| 19 | 1 | 2.375 |" in text
    assert "| 11 | 1 | 1.375 |" in text
    assert "| 10 | 1 |" not in text
    assert "| generate | 42.0 s | 67% |\n| update | 21.0 s | 33% |" in text
    assert "- metrics: `/data/m.jsonl`\n- wandb: <https://wandb.ai/x>" in text


def test_the_dashboard_stays_small_for_a_long_run() -> None:
    lines = [line(step, **{"eval/all/avg_score": math.sin(step), "policy/kl": 0.1}) for step in range(1, 5001)]
    assert len(dashboard_markdown("r", lines, {})) < 100_000


def test_a_dashboard_before_the_first_step_is_whole() -> None:
    assert "| step | epoch |" in dashboard_markdown("r", [], {})


def test_a_failure_says_what_failed_and_what_happens_next() -> None:
    try:
        raise ValueError("NaN in `loss`\n  of rank 1")
    except ValueError as error:
        text = failure_markdown("update", 12, error, "Trying again in 2 s (attempt 2).")
        setup = failure_markdown("set-up", 0, error, "Start again.")
    assert text.startswith(
        "## Failed: update, step 12\n\n`ValueError: NaN in 'loss' of rank 1`\n\n"
        "**Next:** Trying again in 2 s (attempt 2).\n\n### Traceback\n\n"
        "    Traceback (most recent call last):\n"
    )
    assert all(not part or part.startswith("    ") for part in text.split("\n\n", 4)[4].split("\n"))
    assert setup.startswith("## Failed: set-up\n")


def test_the_sample_that_caused_a_failure_is_shown_as_it_is() -> None:
    error = RewardError("the environment of data:1/0 returned nan as reward; it must be finite")
    error.sample = {"uid": "data:1, sample 0", "prompt": "user: 1+1=\n## no heading", "response": ""}
    text = failure_markdown("generate", 3, pickle.loads(pickle.dumps(error)), "Correct it.")  # noqa: S301
    assert "### Sample\n\nuid:\n\n    data:1, sample 0\n\nprompt:\n\n    user: 1+1=\n    ## no heading\n" in text
    assert "response:\n\n    \n\n### Traceback" in text

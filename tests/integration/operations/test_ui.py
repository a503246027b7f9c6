"""The pages as people see them, in a real browser: the form, the run with its stages, the dashboard with its curves.

With SKYRL_FLOWS_SCREENSHOTS set to a folder the pictures are kept there.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun

from tests.integration.operations.conftest import Team, wait_for

pytestmark = pytest.mark.service
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of a headless Chromium, the one that the system installs."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    assert chromium, "Chromium is not installed; on Debian: apt-get install chromium"
    with sync_playwright() as playwright:
        # Chromium refuses its sandbox to root.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"] if not os.getuid() else [])
        found = browser.new_page(viewport={"width": 1400, "height": 1000})
        found.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        yield found
        browser.close()


def shoot(page: Page, name: str, folder: Path) -> None:
    kept = os.environ.get("SKYRL_FLOWS_SCREENSHOTS")
    page.screenshot(path=Path(kept or folder) / f"{name}.png")


def tab(page: Page, name: str) -> None:
    page.locator("li.p-tab", has_text=name).click()


def submit(team: Team, page: Page, *words: str) -> FlowRun:
    """Start `train` with overrides through the UI's form, as a person would; returns its run."""
    deployment = team.client.read_deployment_by_name("train/train")
    before = {run.id for run in team.runs("train/train")}
    page.goto(f"{team.api_url.removesuffix('/api')}/deployments/deployment/{deployment.id}/run")
    expect(page.get_by_text("that win over the file")).to_be_visible()
    for number, word in enumerate(words):
        page.get_by_role("button", name="Add item").click()
        page.locator(".p-draggable-list textarea").nth(number).fill(word)
    shoot(page, "form", team.root)
    page.get_by_role("button", name="Submit").click()
    new: list[FlowRun] = wait_for(
        lambda: [run for run in team.runs("train/train") if run.id not in before], "a run from the form", 30.0
    )
    return new[0]


def test_the_form_starts_a_run_whose_pages_show_stages_and_curves(new_team: Callable[..., Team], page: Page) -> None:
    team = new_team("pages")
    team.deploy()
    team.worker("training")
    started = submit(
        team, page, "trainer.run_name=from-form", "trainer.max_training_steps=3", "trainer.eval_interval=1"
    )
    run = team.ended(started)
    assert run.state is not None
    assert run.state.is_completed(), run.state.message
    ui = team.api_url.removesuffix("/api")

    page.goto(f"{ui}/runs/flow-run/{run.id}")
    tab(page, "Artifacts")
    expect(page.get_by_text("dashboard-from-form").first).to_be_visible()
    shoot(page, "run", team.root)

    children = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[run.id]))
    (epoch,) = [
        child
        for child in team.client.read_flow_runs(flow_run_filter=children)
        if re.fullmatch("from-form epoch 1", child.name)
    ]
    page.goto(f"{ui}/runs/flow-run/{epoch.id}")
    tab(page, "Task Runs")
    for stage in ("generate", "score", "update", "sync", "evaluate"):
        expect(page.get_by_text(f"{stage} step 3").first).to_be_visible()
    expect(page.get_by_text("checkpoint step 2").first).to_be_visible()
    shoot(page, "stages", team.root)

    page.goto(f"{ui}/runs/flow-run/{run.id}")
    tab(page, "Artifacts")
    page.get_by_text("dashboard-from-form").first.click()
    curves = page.locator("img[alt^='reward, accuracy']").first
    expect(curves).to_be_visible()
    assert curves.evaluate("picture => picture.complete && picture.naturalWidth > 300")
    expect(page.get_by_text("Last steps").first).to_be_visible()
    expect(page.get_by_text("Time by stage").first).to_be_visible()
    shoot(page, "dashboard", team.root)


def test_a_wrong_word_in_the_form_is_explained_on_the_run_page(new_team: Callable[..., Team], page: Page) -> None:
    team = new_team("pages-wrong")
    team.deploy()
    team.worker("training")
    run = team.ended(submit(team, page, "trainer.epohcs=2"))
    assert run.state is not None
    assert run.state.is_failed()
    page.goto(f"{team.api_url.removesuffix('/api')}/runs/flow-run/{run.id}")
    expect(page.get_by_text("unknown key trainer.epohcs; did you mean trainer.epochs?").first).to_be_visible()

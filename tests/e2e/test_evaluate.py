"""`skyrl-flows evaluate` on a checkpoint finds what the run itself logged for that step."""

import json

from tests.e2e.conftest import Project


def test_a_checkpoint_scores_what_the_run_logged_for_its_step(uninterrupted: Project) -> None:
    logged = {line.step: line.metrics for line in uninterrupted.metrics("k")}[6]
    output = uninterrupted.run(
        "trainer.run_name=again", "--checkpoint", str(uninterrupted.checkpoint("k", 6)), command="evaluate"
    )
    assert f"{logged['eval/all/avg_score']:.3f}" in output
    folder = uninterrupted.root / "exports" / "evaluations" / "again" / "dumped_evals" / "global_step_6_evals"
    report = json.loads((folder / "aggregated_results.json").read_text())
    assert report["overall"]["avg_score"] == logged["eval/all/avg_score"]
    assert report["overall"]["greedy_score"] == logged["eval/all/greedy_score"]
    assert report["sources"]["digits"]["prompts"] == 8


RECORDER = """
import json
import pathlib


class Recorder:
    def log(self, metrics, step):
        pathlib.Path("recorded.json").write_text(json.dumps([step, metrics["eval/all/avg_score"]]))

    def log_exception(self, error, where):
        pass

    def finish(self, ok):
        pass


def make(config, *, run_name, run_dir, run_key=""):
    return Recorder()
"""


def test_a_model_alone_is_evaluated_without_training_data(uninterrupted: Project) -> None:
    start = uninterrupted.metrics("k")[0].metrics
    (uninterrupted.root / "recorder.py").write_text(RECORDER)
    output = uninterrupted.run(
        "trainer.run_name=model",
        "data.train_data=[nowhere.parquet]",
        "hooks.tracker=recorder:make",
        "--model",
        str(uninterrupted.root / "model"),
        command="evaluate",
    )
    assert f"{start['eval/all/avg_score']:.3f}" in output
    assert json.loads((uninterrupted.root / "recorded.json").read_text()) == [0, start["eval/all/avg_score"]]

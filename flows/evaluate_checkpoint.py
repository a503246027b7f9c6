"""The evaluation that starts by itself when a checkpoint appears: once per checkpoint, then promotion.

checkpoint.saved ─▶ pin ─▶ evaluate (or find its score) ─▶ aliases move when it is better ─▶ checkpoint.evaluated
"""

import logging
import posixpath
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, State
from pydantic import Field

from flows.evaluate import Evaluation
from flows.flow_runs import name_flow_run
from flows.parameters import ConfigFile, Overrides
from flows.preflight import check_before_start
from flows.settings import load_settings, run_configuration
from skyrl_core.checkpoint.aliases import Decision, promote
from skyrl_core.checkpoint.code_version import code_version
from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.checkpoint.manifest import MANIFEST, CheckpointManifest
from skyrl_core.checkpoint.pins import pinned
from skyrl_core.checkpoint.scores import CheckpointScore, find_score, record_score
from skyrl_core.config import SkyRLConfig
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import ConfigurationError
from tasks.events import ALIAS_MOVED, BELOW_THRESHOLD, CHECKPOINT_EVALUATED, send_event

logger = logging.getLogger(__name__)

DEFAULT_METRIC = "eval/all/avg_score"


@flow(name="evaluate-checkpoint")
def evaluate_checkpoint(
    path: str,
    step: Annotated[int, Field(ge=0)],
    run: str,
    config: ConfigFile = None,
    overrides: Overrides = (),
    metric: str = DEFAULT_METRIC,
    aliases: tuple[str, ...] = ("best", "production"),
    min_score: float | None = None,
    min_gain: Annotated[float, Field(ge=0.0)] = 0.0,
) -> dict[str, Any] | State:
    """Evaluate a checkpoint once, keep the score beside it, and promote it when it is better than what is there.

    A checkpoint with a score for the same prompts and sampling is not evaluated again.

    Args:
        path: The checkpoint: a folder `global_step_N` of a run.
        step: Its step, as the event tells it.
        run: The run it belongs to, as the event tells it.
        config: YAML file with keys. Empty: the run's own configuration.
        overrides: Words `key=value` that win over the file. `skyrl-flows config --help-keys` lists the keys.
        metric: The score that decides.
        aliases: Names that move to a better checkpoint.
        min_score: Below it nothing is promoted, and `evaluation.below_threshold` is sent.
        min_gain: A better score must be better by more than this.
    """
    log = get_run_logger()
    name_flow_run(f"{run} step {step}")
    run_root = posixpath.dirname(path.rstrip("/"))
    if config is not None:
        load_settings(config, overrides)  # For access to the store, before anything is read from it.
    with ExitStack() as stack:
        stack.enter_context(pinned(run_root, step, f"flow run {flow_run.id}"))
        if open_storage(path).size(MANIFEST) is None:
            return Completed(
                name="Skipped",
                message=f"{path} is gone: retention deleted it before it was evaluated. Keep more checkpoints "
                "(trainer.max_ckpts_to_keep) or let more workers evaluate.",
            )
        manifest = _matching(path, step, run)
        file = config or run_configuration(run_root, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if file is None:
            raise ConfigurationError(f"{run_root} has no configuration of its run: name a file with `config`")
        settings = load_settings(file, [*overrides, f"trainer.run_name={run}-step-{step}"])
        check_before_start(settings, training=False)
        score = _score(settings, path, run_root, run, manifest)
        log.info("%s step %d: %s", run, step, _shown(score, metric))
        decisions = [
            promote(posixpath.dirname(run_root), alias, score, metric=metric, min_score=min_score, min_gain=min_gain)
            for alias in aliases
        ]
    return _announce(score, path, metric, min_score, decisions)


def _matching(path: str, step: int, run: str) -> CheckpointManifest:
    """The checkpoint's manifest, all its files checked; refuses a checkpoint that is not the one announced."""
    _, manifest = checkpoint_at(path)
    if (manifest.run_name, manifest.step) != (run, step):
        raise ConfigurationError(
            f"{path} holds step {manifest.step} of run {manifest.run_name}, not step {step} of run {run}: give the "
            "three that belong together"
        )
    return manifest


def _score(settings: SkyRLConfig, path: str, run_root: str, run: str, manifest: CheckpointManifest) -> CheckpointScore:
    """The score that is there, or a new one."""
    evaluation = Evaluation(
        config=settings,
        name=str(settings.trainer.run_name),
        checkpoint=path,
        step=manifest.step,
        weights=manifest.content_digest,
        export_dir=Path(settings.trainer.export_path).expanduser() / "evaluations" / str(settings.trainer.run_name),
        store_root=f"{run_root}/evaluations/global_step_{manifest.step}/store",
    )
    prepared = evaluation.prepare()
    found = find_score(run_root, manifest.step, manifest.content_digest, prepared.identity)
    if found is not None:
        get_run_logger().info("evaluated already at %s by flow run %s", found.created_at, found.evaluated_by)
        return found
    record, _ = evaluation.run(prepared)
    return record_score(
        run_root,
        CheckpointScore(
            run=run,
            step=manifest.step,
            content_digest=manifest.content_digest,
            identity=prepared.identity,
            metrics=record.summary["metrics"],
            code_version=code_version(),
            created_at=record.created_at,
            evaluated_by=str(flow_run.id or ""),
        ),
    )


def _announce(
    score: CheckpointScore, path: str, metric: str, min_score: float | None, decisions: list[Decision]
) -> dict[str, Any]:
    """Tell whoever listens; returns what the flow run shows as its result."""
    log = get_run_logger()
    value = score.metrics[metric]
    name = f"{score.run}/{score.step}"
    moved = [decision.alias for decision in decisions if decision.moved]
    result = {
        "run": score.run,
        "step": score.step,
        "path": path,
        "metric": metric,
        "score": value,
        "identity": score.identity,
        "content_digest": score.content_digest,
        "moved": moved,
    }
    for decision in decisions:
        log.info("alias %s %s: %s", decision.alias, "moved here" if decision.moved else "stays", decision.reason)
        if decision.moved and decision.target is not None:
            target = decision.target
            payload = {
                "alias": decision.alias,
                "move": target.move,
                "checkpoint": path,
                "run": target.run,
                "step": target.step,
                "reason": target.reason,
                "dataset_fingerprint": target.dataset_fingerprint,
                "config_digest": target.config_digest,
                "code_version": target.code_version,
            }
            send_event(ALIAS_MOVED, kind="alias", name=decision.alias, payload=payload)
    send_event(CHECKPOINT_EVALUATED, kind="checkpoint", name=name, payload=result, key=str(flow_run.id))
    if min_score is not None and value < min_score:
        payload = {**result, "min_score": min_score}
        send_event(BELOW_THRESHOLD, kind="checkpoint", name=name, payload=payload, key=str(flow_run.id))
    return result


def _shown(score: CheckpointScore, metric: str) -> str:
    error = score.metrics.get(metric.replace("avg_score", "standard_error"))
    spread = f" ± {error:.4f}" if error is not None and metric.endswith("avg_score") else ""
    value = score.metrics.get(metric)
    return f"{metric} " + ("is missing" if value is None else f"{value:.4f}{spread}")

"""`skyrl-flows checkpoints`: what a store holds, with scores, aliases and sizes."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.settings import load_settings
from skyrl_core.checkpoint.catalog import CheckpointEntry, RunEntry, list_runs, read_run
from skyrl_core.errors import ConfigurationError

_SCORE = "eval/all/avg_score"


def run(args: argparse.Namespace) -> int:
    """Print a table, or JSON."""
    root = load_settings(args.config, args.overrides).trainer.ckpt_path
    names = list_runs(root)
    if args.run is not None:
        if args.run not in names:
            raise ConfigurationError(f"{root} has no run {args.run}; it has: {', '.join(names) or 'none'}")
        names = [args.run]
    runs = [read_run(root, name) for name in names]
    if args.json:
        print(json.dumps([_row(run, saved, args.metric) for run in runs for saved in run.checkpoints], indent=2))
    elif not any(run.checkpoints for run in runs):
        print(f"{root} has no checkpoints yet ({len(runs)} run(s))")
    else:
        Console().print(_table(root, runs, args.metric))
    return 0


def _row(run: RunEntry, saved: CheckpointEntry, metric: str) -> dict[str, Any]:
    manifest = saved.manifest
    return {
        "run": run.name,
        "step": saved.step,
        "path": saved.uri,
        "score": _score(saved, metric),
        "aliases": list(saved.aliases),
        "pinned": saved.pinned,
        "bytes": saved.bytes,
        "created_at": manifest.created_at,
        "code_version": manifest.code_version,
        "config_digest": manifest.config_digest,
        "dataset_fingerprint": manifest.dataset_fingerprint,
        "content_digest": manifest.content_digest,
        "run_finished": run.state.finished,
    }


def _score(saved: CheckpointEntry, metric: str) -> float | None:
    """The latest score of the checkpoint."""
    values = [score.metrics[metric] for score in saved.scores if metric in score.metrics]
    return values[-1] if values else None


def _table(root: str, runs: Sequence[RunEntry], metric: str) -> Table:
    table = Table(title=f"Checkpoints in {root}", title_justify="left")
    table.add_column("run")
    for label in ("step", metric.removeprefix("eval/"), "MB"):
        table.add_column(label, justify="right", no_wrap=True)
    for label in ("aliases", "saved at (UTC)", "code"):
        table.add_column(label, no_wrap=label != "aliases")
    for run in runs:
        for index, saved in enumerate(run.checkpoints):
            score = _score(saved, metric)
            state = "" if run.state.finished else " (unfinished)"
            table.add_row(
                Text(f"{run.name}{state}" if index == 0 else ""),
                str(saved.step),
                "" if score is None else f"{score:.4f}",
                f"{saved.bytes / 1e6:,.1f}",
                ", ".join(saved.aliases),
                saved.manifest.created_at.replace("T", " ")[:16],
                saved.manifest.code_version.rpartition("+")[2][:9],
            )
        table.add_section()
    return table

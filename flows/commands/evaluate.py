"""`skyrl-flows evaluate`: score a checkpoint or a model on the validation data, without training data."""

import argparse
import posixpath
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from flows.environment import prepare_this_process
from flows.settings import run_configuration
from skyrl_core.config import load_config
from skyrl_core.data.storage import open_storage
from skyrl_core.errors import ConfigurationError
from skyrl_core.evaluation.metrics import EvalReport
from skyrl_core.evaluation.report_table import report_table


def run(args: argparse.Namespace) -> int:
    """Run the evaluation flow in this process."""
    prepare_this_process(debug=args.debug)
    if args.checkpoint and args.model:
        raise ConfigurationError("--checkpoint and --model exclude each other: name one of them")
    overrides = [*args.overrides, *([f"trainer.policy.model.path={args.model}"] if args.model else [])]
    with TemporaryDirectory() as folder:
        report = _evaluate(args.config or _config_of(args.checkpoint, Path(folder)), overrides, args.checkpoint)
    Console().print(report_table(report))
    return 0


def _evaluate(config_file: str | None, overrides: list[str], checkpoint: str | None) -> EvalReport:
    """Run the flow against a Prefect API, started when there is none."""
    config = load_config(config_file, overrides)
    from flows.commands.train import prefect_api

    with prefect_api(config, training=False):
        from flows.evaluate import evaluate

        return EvalReport.from_json(evaluate(config=config_file, overrides=tuple(overrides), checkpoint=checkpoint))


def _config_of(checkpoint: str | None, folder: Path) -> str | None:
    """The configuration beside a checkpoint's run, so that `--checkpoint` alone is enough."""
    if checkpoint is None:
        return None
    return run_configuration(posixpath.dirname(open_storage(checkpoint).uri), folder)

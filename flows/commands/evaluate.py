"""`skyrl-flows evaluate`: score a checkpoint or a model on the validation data, without training data."""

import argparse

from flows.environment import prepare_this_process
from skyrl_core.config import load_config
from skyrl_core.errors import ConfigurationError


def run(args: argparse.Namespace) -> int:
    """Run the evaluation flow in this process."""
    prepare_this_process(debug=args.debug)
    if args.checkpoint and args.model:
        raise ConfigurationError("--checkpoint and --model exclude each other: name one of them")
    overrides = [*args.overrides, *([f"trainer.policy.model.path={args.model}"] if args.model else [])]
    config_file = args.config or _config_of(args.checkpoint)
    config = load_config(config_file, overrides)
    from flows.commands.train import prefect_api

    with prefect_api(config, training=False):
        from rich.console import Console

        from flows.evaluate import evaluate
        from skyrl_core.evaluation.metrics import EvalReport
        from skyrl_core.evaluation.report_table import report_table

        report = EvalReport.from_json(
            evaluate(config=config_file, overrides=tuple(overrides), checkpoint=args.checkpoint)
        )
    Console().print(report_table(report))
    return 0


def _config_of(checkpoint: str | None) -> str | None:
    """The configuration beside a checkpoint's run, so that `--checkpoint` alone is enough."""
    from pathlib import Path

    if checkpoint is None:
        return None
    path = Path(checkpoint).expanduser().absolute().parent / "config.yaml"
    return str(path) if path.is_file() else None

"""`skyrl-flows train`: one command that starts what is missing, trains, and sums up."""

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from flows.environment import prepare_this_process
from flows.preflight import check_before_start
from skyrl_core.config import SkyRLConfig, load_config


def run(args: argparse.Namespace) -> int:
    """Run the training flow in this process."""
    prepare_this_process(debug=args.debug)
    config = load_config(args.config, args.overrides)
    with prefect_api(config):
        from rich.console import Console

        from flows.train import train
        from skyrl_core.tracking.summary import RunSummary, summary_table

        summary = RunSummary(**train(config=args.config, overrides=tuple(args.overrides)))
    if config.flow.show != "off":
        Console().print(summary_table(summary))
    return 0


@contextmanager
def prefect_api(config: SkyRLConfig, *, training: bool = True) -> Iterator[str]:
    """A reachable Prefect API, its address printed. While a local server starts, data and model are made or checked.

    Yields the UI's address. Whatever was started here is stopped on leaving.
    """
    from flows.server import ensure_server
    from skyrl_core.recipes.ensure import prepare_recipe, recipe_missing

    missing = recipe_missing(config)
    check_before_start(config, training=training, files=not missing)
    server = ensure_server(config.flow.prefect_port)
    try:
        if server.embedded:
            print(f"Prefect: {'sharing the' if server.adopted else 'starting a'} local server, UI at {server.ui_url}")
        else:
            server.wait_ready(timeout=5.0)
            print(f"Prefect: using {server.api_url}")
        if missing:
            prepare_recipe(config)
            check_before_start(config, training=training)
        # Importing takes about as long as the server needs to start.
        importlib.import_module("flows.train" if training else "flows.evaluate")
        server.wait_ready(config.flow.prefect_start_timeout_seconds)
        yield server.ui_url
    finally:
        flush_reports()
        if server.release():
            print("Prefect: the local server is stopped; `skyrl-flows ui` shows its runs again")


def flush_reports() -> None:
    """Send the log records and events that Prefect holds back: at exit it would wait for a server that is gone."""
    import sys

    if "prefect" not in sys.modules:
        return
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=10.0)

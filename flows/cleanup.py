"""The clean-up flow: retention for runs that nobody writes, and what killed processes left behind."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.logging import get_run_logger
from pydantic import Field

from flows.parameters import ConfigFile, Overrides
from flows.settings import load_settings
from skyrl_core.checkpoint.aliases import aliased_steps
from skyrl_core.checkpoint.catalog import RunEntry, list_runs, read_run
from skyrl_core.checkpoint.pins import pinned_steps, remove_stale_pins
from skyrl_core.checkpoint.retention import apply_retention, clean_leftovers, superfluous
from skyrl_core.data.lease import Lease
from skyrl_core.data.run_store import RunStore
from skyrl_core.errors import RunBusyError


@flow(name="cleanup")
def cleanup(
    config: ConfigFile = None,
    overrides: Overrides = (),
    keep: Annotated[int, Field(ge=1)] | None = 1,
    abandoned_days: Annotated[float, Field(gt=0)] = 14.0,
    pin_hours: Annotated[float, Field(gt=0)] = 24.0,
    dry_run: bool = False,
) -> list[dict[str, Any]]:
    """Delete old checkpoints and leftovers of every run in the store that is finished or abandoned.

    What an alias or a running evaluation needs stays, and so does every run that a living process writes.

    Args:
        config: YAML file with keys, by its path on the machine that runs the flow. Empty: the defaults.
        overrides: Words `key=value` that win over the file. `skyrl-flows config --help-keys` lists the keys.
        keep: Newest checkpoints to keep of each run. Empty: all.
        abandoned_days: An unfinished run that was not touched for so many days is treated as finished.
        pin_hours: A pin this old belongs to nobody.
        dry_run: Only say what would be deleted.

    Returns:
        A row for each run.
    """
    log = get_run_logger()
    root = load_settings(config, overrides).trainer.ckpt_path
    rows = []
    for name in list_runs(root):
        entry = read_run(root, name)
        row = {"run": name, "state": "finished" if entry.state.finished else "unfinished", "deleted": "", "bytes": 0}
        if _due(entry, abandoned_days):
            row |= _clean(root, entry, keep, timedelta(hours=pin_hours), dry_run=dry_run)
        rows.append(row)
        log.info("%s", row)
    create_table_artifact(table=rows, key="cleanup", description=f"Clean-up of {root}{' (dry run)' if dry_run else ''}")
    return rows


def _due(entry: RunEntry, abandoned_days: float) -> bool:
    """True for a finished run, and for one that nobody touched for long."""
    touched = [entry.document.get("created_at"), *(saved.manifest.created_at for saved in entry.checkpoints)]
    newest = max((datetime.fromisoformat(str(moment)) for moment in touched if moment), default=None)
    abandoned = newest is not None and datetime.now(UTC) - newest > timedelta(days=abandoned_days)
    return entry.state.finished or abandoned


def _clean(root: str, entry: RunEntry, keep: int | None, pin_age: timedelta, *, dry_run: bool) -> dict[str, Any]:
    protected = pinned_steps(entry.uri) | aliased_steps(root, entry.name)
    newest = -1 if keep is None else keep
    if dry_run:
        return _row([saved.step for saved in superfluous(entry.uri, newest, protected)], entry)
    try:
        with Lease.acquire(entry.uri, {"purpose": "cleanup"}) as lease:
            store = RunStore.open(entry.uri, fence=lease.token)
            clean_leftovers(entry.uri, fence=lease.token)
            remove_stale_pins(entry.uri, pin_age)
            deleted = apply_retention(entry.uri, newest, protected, fence=lease.token)
            remaining = [saved.step for saved in entry.checkpoints if saved.step not in deleted]
            if remaining:
                store.prune_before(max(remaining) + 1)
    except RunBusyError as error:
        return {"state": "busy", "deleted": "", "note": str(error).split(".")[0]}
    return _row(deleted, entry)


def _row(steps: list[int], entry: RunEntry) -> dict[str, Any]:
    return {
        "deleted": ", ".join(str(step) for step in steps),
        "bytes": sum(saved.bytes for saved in entry.checkpoints if saved.step in steps),
    }

"""`skyrl-flows promote`: point an alias at a checkpoint by hand, or show where aliases have pointed."""

import argparse
import getpass
import posixpath

from rich.console import Console
from rich.table import Table

from skyrl_core.checkpoint.aliases import alias_history, move_alias
from skyrl_core.checkpoint.discovery import checkpoint_at
from skyrl_core.data.storage import open_storage


def run(args: argparse.Namespace) -> int:
    """Move the alias, then print its history."""
    saved, _ = checkpoint_at(args.checkpoint, verify="size")
    run_root = posixpath.dirname(open_storage(args.checkpoint).uri)
    root, name = posixpath.split(run_root)
    move_alias(root, args.alias, name, saved.step, reason=f"by hand, {getpass.getuser()}")
    table = Table("move", "checkpoint", "score", "why", "at (UTC)", title=args.alias, title_justify="left")
    for move in alias_history(root, args.alias):
        score = "" if move.score is None else f"{move.score:.4f}"
        table.add_row(str(move.move), move.checkpoint, score, move.reason, move.moved_at)
    Console().print(table)
    return 0

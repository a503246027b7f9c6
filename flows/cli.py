"""Interim command line; the configuration engineer's own replaces it."""

import argparse
import importlib
import sys
import traceback


def main(argv=None) -> int:
    p = argparse.ArgumentParser(prog="skyrl-flows")
    sub = p.add_subparsers(dest="command", required=True)
    for name in ("train", "evaluate"):
        q = sub.add_parser(name)
        q.add_argument("--config")
        q.add_argument("--debug", action="store_true")
        if name == "evaluate":
            q.add_argument("--checkpoint")
            q.add_argument("--model")
        q.add_argument("overrides", nargs="*")
    q = sub.add_parser("prepare")
    q.add_argument("what")
    q.add_argument("--output")
    q.add_argument("--force", action="store_true")
    q = sub.add_parser("ui")
    q.add_argument("--port", type=int, default=0)
    args = p.parse_args(argv)
    from skyrl_core.errors import SkyRLError

    try:
        return importlib.import_module(f"flows.commands.{args.command}").run(args)
    except SkyRLError as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())

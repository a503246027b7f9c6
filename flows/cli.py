"""The command line: what each command takes, and how errors end. Commands are imported when they are run.

Nothing here imports torch, ray, prefect or transformers, so that a mistyped key is answered at once. A command is a
module `flows.commands.<name>` with `run(args) -> int`, which returns the exit code.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from skyrl_core.errors import SkyRLError

_INTERRUPTED = 130
_READER_LEFT = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 wrong words, configuration or data, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = _top_parser().parse_args(words[:1])
    args = _command_parser(chosen.command).parse_intermixed_args(words[1:])
    try:
        code: int = importlib.import_module(f"flows.commands.{chosen.command}").run(args)
        sys.stdout.flush()
    except SkyRLError as error:
        return _fail(str(error), error.exit_code, debug=args.debug)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output left (`skyrl-flows config | head`); nothing may be written to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    except Exception as error:
        hint = "" if args.debug else "; run again with --debug to see where"
        return _fail(f"unexpected {type(error).__name__}: {error}{hint}", 1, debug=args.debug)
    return code


def _fail(message: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


def _top_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<13}{summary}" for name, (summary, _) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="skyrl-flows",
        usage="skyrl-flows COMMAND [option ...] [key=value ...]",
        description="Reinforcement-learning post-training of language models as a durable workflow.",
        epilog=f"commands:\n{listing}\n\n`skyrl-flows COMMAND --help` says what a command takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=tuple(_COMMANDS), metavar="COMMAND", help="what to do, see below")
    return parser


def _command_parser(name: str) -> argparse.ArgumentParser:
    summary, add_arguments = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"skyrl-flows {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file with keys; words win over it")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="keys to set, as trainer.epochs=2; `config --help-keys` lists them",
    )


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    _add_configuration(parser)
    parser.add_argument("--checkpoint", metavar="DIR", help="checkpoint to evaluate: a folder global_step_N")
    parser.add_argument("--model", metavar="PATH", help="model to evaluate: a folder or a Hugging Face name")


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("arithmetic",), help="which data and model to make")
    parser.add_argument("--output", metavar="DIR", help="folder to make them in (default: data/arithmetic)")
    parser.add_argument("--force", action="store_true", help="make them again although they are there")


def _add_config(parser: argparse.ArgumentParser) -> None:
    _add_configuration(parser)
    parser.add_argument(
        "--help-keys",
        nargs="?",
        const="",
        metavar="PREFIX",
        help="list every key, or those below PREFIX, with type, default and meaning",
    )


def _add_checkpoints(parser: argparse.ArgumentParser) -> None:
    _add_configuration(parser)
    parser.add_argument("--run", metavar="NAME", help="only this run")
    parser.add_argument("--metric", metavar="NAME", default="eval/all/avg_score", help="score to show")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="DIR", help="checkpoint: a folder global_step_N")
    parser.add_argument("--alias", metavar="NAME", default="production", help="alias to move (default: production)")


def _add_deploy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pool", metavar="NAME", default="skyrl", help="work pool; made when missing")
    parser.add_argument("--pool-type", choices=("process", "kubernetes"), default="process", help="its type then")
    parser.add_argument("--workdir", metavar="DIR", help="folder that runs start in on the workers (default: this one)")
    parser.add_argument("--notify", metavar="BLOCK", help="notification block for messages, as slack-webhook/team")
    parser.add_argument("--folder", metavar="DIR", default="deployments", help="folder of prefect.yaml")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_configuration(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_ui(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=_port, default=0, help="port to serve at (default: any free one)")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 1 to 65535, or 0 for any free one")
    return int(text)


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "train": ("train a model", _add_configuration),
    "evaluate": ("score a checkpoint or a model on the evaluation data", _add_evaluate),
    "prepare": ("make example data and a small model to start from", _add_prepare),
    "config": ("print the configuration that a command would use", _add_config),
    "checkpoints": ("list checkpoints with scores, aliases and sizes", _add_checkpoints),
    "promote": ("point an alias at a checkpoint", _add_promote),
    "deploy": ("put deployments and automations on a Prefect server", _add_deploy),
    "doctor": ("look at everything in reach and say what to do", _add_doctor),
    "ui": ("serve the pages of earlier runs", _add_ui),
}


if __name__ == "__main__":
    sys.exit(main())

"""`skyrl-flows prepare`: makes example data and a small model to start from."""

import argparse
import time

from skyrl_core.recipes.arithmetic import ArithmeticSettings, ensure_arithmetic
from skyrl_core.recipes.progress import progress_bar

DEFAULT_OUTPUT = "data/arithmetic"


def run(args: argparse.Namespace) -> int:
    """Make the folder unless it is there."""
    output = args.output or DEFAULT_OUTPUT
    settings = ArithmeticSettings()
    began = time.monotonic()
    with progress_bar("warming up the model") as progress:
        made = ensure_arithmetic(output, settings=settings, force=args.force, progress=progress)
    if made:
        seconds = time.monotonic() - began
        print(
            f"{output}: {settings.train_size} problems to train on, {settings.test_size} held out, and a small model "
            f"(made in {seconds:.0f} s)"
        )
    else:
        print(f"{output} is there and complete; nothing to do (--force makes it again)")
    return 0

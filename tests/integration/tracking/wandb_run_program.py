"""Logs steps to wandb through the tracker, then ends as told; run by the tests as a process of its own."""

import os
import signal
import sys
from pathlib import Path

from skyrl_core.config import SkyRLConfig
from skyrl_core.tracking.build import build_tracker


def main(run_dir: str, steps: int, end: str) -> None:
    config = SkyRLConfig.model_validate(
        {
            "trainer": {"logger": "wandb", "project_name": "arithmetic", "tags": ["nightly"]},
            "generator": {"inference_engine": {"engine_init_kwargs": {"api_key": "not-for-others"}}},
        }
    )
    tracker = build_tracker(config, run_name="night 1", run_dir=Path(run_dir), run_key="first")
    for step in range(steps):
        tracker.log({"reward/avg_raw_reward": step / 4}, step)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "fail":
        try:
            raise ValueError("NaN in loss")
        except ValueError as error:
            tracker.log_exception(error, f"update step {steps}")
    tracker.finish(end == "finish")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])

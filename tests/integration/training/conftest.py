"""The fixtures of the unit tests of training, for tests that need several processes."""

from tests.unit.training.conftest import (  # noqa: F401
    make_batch,
    make_config,
    make_policy,
    model_path,
    one_thread,
    trajectories,
    weights_of,
)

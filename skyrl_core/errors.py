"""Every error this project raises on purpose.

    SkyRLError
    ├── ConfigurationError          what the user wrote cannot work           exit code 2
    │   └── NotAvailableYetError    a known key whose feature is not built    exit code 2
    ├── DatasetError                rows missing, malformed, too few          exit code 2
    ├── PlacementError              the cluster cannot hold the run
    ├── RolloutError                generation or environments failed
    │   ├── EngineUnavailableError      an engine died                        transient
    │   └── GenerationTimeoutError      an engine answered too late           transient
    ├── RewardError                 a reward that is no number
    ├── TrainingError
    │   ├── WorkerUnavailableError      a training rank died                  transient
    │   └── NonFiniteLossError          NaN or inf in loss or gradient
    ├── WeightSyncError
    ├── CheckpointError
    │   └── CorruptCheckpointError  a file is missing, short, or altered
    ├── StoreError                  the run store cannot be read or written   transient
    │   └── RunBusyError            another process writes this run name
    │       └── LeaseLostError      this process was superseded as writer
    └── OrchestrationError          Prefect or Ray cannot be reached or started
        └── StateMismatchError      a stage found a precondition false        transient

`transient` marks what may be retried after reconciling. Configuration and data errors never are.
All of them survive pickling, so they cross Ray with type and message intact.
"""

from collections.abc import Mapping


class SkyRLError(Exception):
    """Base of all errors raised on purpose. `str(error)` says what was wrong, where, and what to do.

    `sample` is the trajectory that caused it, as named texts for people (uid, prompt, response), where there is one.
    """

    transient: bool = False
    exit_code: int = 1
    sample: Mapping[str, str] | None = None


class ConfigurationError(SkyRLError):
    """The configuration cannot work as written."""

    exit_code = 2


class NotAvailableYetError(ConfigurationError):
    """A valid SkyRL key was set to a value whose feature this version does not have."""


class DatasetError(SkyRLError):
    """A data file is missing, malformed, empty, or too small."""

    exit_code = 2


class PlacementError(SkyRLError):
    """The cluster cannot hold the placement that the configuration asks for."""


class RolloutError(SkyRLError):
    """Generation or environments failed for more than single trajectories."""


class EngineUnavailableError(RolloutError):
    """An inference engine died or cannot be reached."""

    transient = True


class GenerationTimeoutError(RolloutError):
    """An inference engine did not answer within its time limit."""

    transient = True


class RewardError(SkyRLError):
    """An environment returned a reward that is not a finite number."""


class TrainingError(SkyRLError):
    """An update failed."""


class WorkerUnavailableError(TrainingError):
    """A training rank died or stopped answering."""

    transient = True


class NonFiniteLossError(TrainingError):
    """Loss or gradient became NaN or infinite; weights were left as before the optimizer step."""


class WeightSyncError(SkyRLError):
    """Weights could not be brought from the trainer to the engines."""

    transient = True


class CheckpointError(SkyRLError):
    """A checkpoint cannot be written, found, or restored."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's file is missing, truncated, or altered."""


class StoreError(SkyRLError):
    """The run store cannot be read or written."""

    transient = True


class RunBusyError(StoreError):
    """Another living process holds the lease of this run name."""

    transient = False


class LeaseLostError(RunBusyError):
    """This process is no longer the writer of its run: a newer one took over."""


class OrchestrationError(SkyRLError):
    """Prefect or Ray cannot be reached or started."""


class StateMismatchError(OrchestrationError):
    """A stage found actors in another state than it needs; the flow must reconcile and submit again."""

    transient = True


def is_transient(error: BaseException) -> bool:
    """True when reconciling and trying again may help. Errors not of our tree are judged by the caller."""
    return isinstance(error, SkyRLError) and error.transient

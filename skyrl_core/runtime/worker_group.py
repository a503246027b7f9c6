"""A group of Ray actors that act as one: call all ranks, fail as one, say which rank and why."""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from skyrl_core.errors import SkyRLError, WorkerUnavailableError
from skyrl_core.runtime.actor_host import submit

# How long to wait for a rank's own account after another rank failed: a dead peer makes the others fail in their
# collectives, and the first to be reported is not always the cause.
_CAUSE_GRACE_SECONDS = 1.0


class WorkerGroup:
    """Handle to the ranks of one role. Picklable; `incarnation` tells one build of the group from the next."""

    __slots__ = ("incarnation", "ranks", "role")

    def __init__(self, role: str, ranks: Sequence[ActorHandle], incarnation: int) -> None:
        self.role = role
        self.ranks = list(ranks)
        self.incarnation = incarnation

    def __len__(self) -> int:
        return len(self.ranks)

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Run `method` on every rank with the same arguments; their results in rank order.

        Large arguments are put into the object store once. Raises what the rank raised (its own type and message), or
        WorkerUnavailableError when a rank died or `timeout` seconds passed. The first failure ends the call: ranks
        still inside a collective are left for the flow to kill.
        """
        shared = [ray.put(value) if _is_large(value) else value for value in args]
        references = [submit(rank, self.role, method, *shared, **kwargs) for rank in self.ranks]
        return gather(references, f"{self.role} rank", method, timeout)

    def probe(self, timeout: float) -> None:
        """Return when every rank answered. Raises WorkerUnavailableError when one is dead or silent for `timeout` s."""
        gather([rank.pid.remote() for rank in self.ranks], f"{self.role} rank", "pid", timeout)

    def kill(self) -> None:
        """End every rank at once."""
        for rank in self.ranks:
            ray.kill(rank)


def gather(references: Sequence[Any], what: str, method: str, timeout: float | None) -> list[Any]:
    """Results of one reference per actor, in order; see `WorkerGroup.call` for the errors."""
    number = {reference: index for index, reference in enumerate(references)}
    pending = list(references)
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            late = ", ".join(str(number[reference]) for reference in pending)
            raise WorkerUnavailableError(f"{what} {late} did not finish {method}() within {timeout:g} s")
        failure = _failure(done[0])
        if failure is not None:
            raise _cause(failure, number[done[0]], pending, number, what, method)
    return list(ray.get(list(references)))


def _failure(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except Exception as error:
        return error
    return None


def _cause(
    failure: Exception, index: int, pending: list[Any], number: dict[Any, int], what: str, method: str
) -> BaseException:
    """The most telling of the failures that are in after a moment: a dead rank first, then the first reported."""
    failures = {index: failure}
    done, _ = ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_SECONDS) if pending else ([], [])
    for reference in done:
        if (other := _failure(reference)) is not None:
            failures[number[reference]] = other
    for rank, error in sorted(failures.items()):
        if isinstance(error, ray.exceptions.RayActorError):
            dead = WorkerUnavailableError(f"{what} {rank} died during {method}(): {_one_line(error)}")
            dead.__cause__ = error
            return dead
    if isinstance(failure, ray.exceptions.RayTaskError):
        cause = failure.cause if isinstance(failure.cause, BaseException) else failure
        if not isinstance(cause, SkyRLError) and len(failures) < len(number):
            cause.add_note(f"raised by {what} {index} in {method}()")
        cause.__cause__ = failure
        return cause
    return failure


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _is_large(value: Any) -> bool:
    return not isinstance(value, (str, int, float, bool, type(None)))

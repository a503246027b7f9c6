"""Blocking calls from async code: a few daemon threads, and a time limit that a hanging call cannot hold up."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Self, TypeVar

_ResultT = TypeVar("_ResultT")


class TimeLimitError(TimeoutError):
    """A call took longer than its pool allows."""


class _Job:
    """One call on its way through a worker thread."""

    __slots__ = ("abandoned", "function", "future", "loop")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.abandoned = False

    def run(self) -> None:
        try:
            result, error = self.function(), None
        except BaseException as raised:  # even SystemExit: it must end this call, not the thread
            result, error = None, raised
        try:
            self.loop.call_soon_threadsafe(self._deliver, result, error)
        except RuntimeError:
            # The event loop was closed while the call hung: nobody waits for this answer any more.
            self.abandoned = True

    def _deliver(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(result)
        elif isinstance(error, StopIteration | KeyboardInterrupt | SystemExit | GeneratorExit):
            # A future refuses StopIteration, and the others would end the event loop.
            self.future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            self.future.set_exception(error)


class BlockingPool:
    """Runs at most `workers` blocking calls at once, each for at most `timeout_seconds` from its own start.

    A call over its limit raises TimeLimitError at the caller; its thread cannot be stopped and is left behind, and a
    new one takes its place, so hanging calls never starve others. Threads are daemons: they do not hold up the
    interpreter's exit. `workers` 0 or below runs calls in the event loop itself, without a limit. A context manager.
    """

    def __init__(self, workers: int, timeout_seconds: float) -> None:
        self._workers = workers
        self._timeout = timeout_seconds
        self._free = asyncio.Semaphore(max(workers, 1))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._busy = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    async def run(self, function: Callable[[], _ResultT]) -> _ResultT:
        """The function's result, or its exception (SystemExit and the like as RuntimeError), or TimeLimitError."""
        if self._workers <= 0:
            return function()
        async with self._free:
            job = _Job(function)
            self._busy += 1
            if self._busy > self._threads:
                self._threads += 1
                threading.Thread(target=self._work, name="environment", daemon=True).start()
            self._jobs.put(job)
            try:
                async with asyncio.timeout(self._timeout):
                    result: _ResultT = await job.future
                    return result
            except (TimeoutError, asyncio.CancelledError) as error:
                if not job.future.cancelled():
                    raise  # the call's own TimeoutError
                job.abandoned = True
                self._threads -= 1
                if isinstance(error, TimeoutError):
                    raise TimeLimitError(f"took longer than {self._timeout:g} s") from None
                raise
            finally:
                self._busy -= 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            if job.abandoned:
                return

"""The inference client: spreads requests over engines, keeps their weights in step, and turns silence into errors."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.errors import EngineUnavailableError, GenerationTimeoutError, SkyRLError, WeightSyncError
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest

_ResultT = TypeVar("_ResultT")


class EngineTransport(Protocol):
    """The way to one engine: a Ray actor handle, an engine in this process, a server.

    `call` runs the engine's method of that name and returns its result. It raises EngineUnavailableError when the
    engine is gone, and the engine's own SkyRLError as it is.
    """

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any) -> Any: ...


class LocalTransport:
    """An engine object in this process; its blocking methods run in a thread, so that the event loop stays free."""

    def __init__(self, engine: Any, name: str = "engine-0") -> None:
        self._engine = engine
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.to_thread(getattr(self._engine, method), *args)


def assign_requests(requests: Sequence[GenerationRequest], engines: int) -> list[list[int]]:
    """For each engine, the indices of its requests: contiguous runs of whole prompt groups, as even as those allow.

    Requests of one prompt (same `session_id` up to its last "/") stay together, so that an engine reads the prompt
    once. Depends on the requests' order and the number of engines alone.
    """
    groups: list[list[int]] = []
    previous: str | None = None
    for index, request in enumerate(requests):
        group = request.session_id.rpartition("/")[0]
        if group and group == previous:
            groups[-1].append(index)
        else:
            groups.append([index])
        previous = group
    assigned: list[list[int]] = [[] for _ in range(engines)]
    for members in groups:
        middle = members[0] + members[-1]
        assigned[middle * engines // (2 * len(requests))].extend(members)
    return assigned


class EngineClient:
    """InferenceClient over a list of engines.

    `timeout_seconds` bounds every call to an engine; `health_timeout_seconds` bounds health checks.
    """

    def __init__(
        self,
        transports: Sequence[EngineTransport],
        *,
        timeout_seconds: float = 600.0,
        health_timeout_seconds: float = 30.0,
    ) -> None:
        if not transports:
            raise EngineUnavailableError("the inference client was given no engine")
        self._transports = tuple(transports)
        self._timeout = timeout_seconds
        self._health_timeout = health_timeout_seconds

    @property
    def num_engines(self) -> int:
        return len(self._transports)

    async def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[GenerationOutput]:
        """Completions in the order of the requests. The first failing engine's error is raised, naming the engine."""
        assigned = assign_requests(requests, len(self._transports))
        calls = [
            (transport, indices, self._call(transport, "generate", [requests[index] for index in indices], sampling))
            for transport, indices in zip(self._transports, assigned, strict=True)
            if indices
        ]
        answers = await _all([call for _, _, call in calls])
        outputs: dict[int, GenerationOutput] = {}
        for (transport, indices, _), answer in zip(calls, answers, strict=True):
            if len(answer) != len(indices):
                raise EngineUnavailableError(f"{transport.name} answered {len(answer)} of {len(indices)} requests")
            outputs.update(zip(indices, answer, strict=True))
        return [outputs[index] for index in range(len(requests))]

    async def sleep(self, level: int = 1) -> None:
        await self._everywhere("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._everywhere("wake_up", tags)

    async def pause(self) -> None:
        """Engines hold new requests; those being computed finish."""
        await self._everywhere("pause")

    async def resume(self) -> None:
        await self._everywhere("resume")

    async def update_weights(self, buckets: Sequence[Any], version: int) -> None:
        """Load all buckets into all engines. Afterwards every engine holds `version`, or WeightSyncError says which
        does not; an engine that failed midway reports version None and refuses to generate."""
        await _all([self._update_engine(transport, buckets, version) for transport in self._transports])
        held = await self.versions()
        wrong = {transport.name: got for transport, got in zip(self._transports, held, strict=True) if got != version}
        if wrong:
            raise WeightSyncError(f"after the update to version {version}: {_pairs(wrong)}")

    async def _update_engine(self, transport: EngineTransport, buckets: Sequence[Any], version: int) -> None:
        await self._call(transport, "begin_update")
        for bucket in buckets:
            await self._call(transport, "load_weights", bucket)
        await self._call(transport, "finish_update", version)

    async def versions(self) -> list[int | None]:
        return await self._everywhere("version")

    async def health(self) -> list[str | None]:
        """Per engine: None when it answers, else the error's text. Never raises."""

        async def check(transport: EngineTransport) -> str | None:
            try:
                await self._call(transport, "health", timeout=self._health_timeout)
            except Exception as error:  # any failure to answer is what this method reports
                return f"{type(error).__name__}: {error}"
            return None

        return list(await asyncio.gather(*(check(transport) for transport in self._transports)))

    async def _everywhere(self, method: str, *args: Any) -> list[Any]:
        return await _all([self._call(transport, method, *args) for transport in self._transports])

    async def _call(self, transport: EngineTransport, method: str, *args: Any, timeout: float | None = None) -> Any:
        limit = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit):
                return await transport.call(method, *args)
        except SkyRLError:
            raise
        except TimeoutError as error:
            raise GenerationTimeoutError(
                f"{transport.name} did not answer {method} within {limit:g} s "
                "(generator.inference_engine.timeout_seconds)"
            ) from error
        except (ConnectionError, EOFError) as error:
            raise EngineUnavailableError(
                f"{transport.name} is gone (during {method}): {type(error).__name__}: {error}"
            ) from error


async def _all(calls: Sequence[Coroutine[Any, Any, _ResultT]]) -> list[_ResultT]:
    """Results in order; on the first failure the other calls are cancelled and the failure is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} holds {value}" for name, value in values.items())

"""Inference engines as Ray actors, and the transport that reaches them."""

import itertools
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from skyrl_core.config import SkyRLConfig
from skyrl_core.errors import EngineUnavailableError
from skyrl_core.inference.client import EngineClient
from skyrl_core.runtime.actor_host import start_actor, submit
from skyrl_core.runtime.placement import Placement
from skyrl_core.runtime.worker_group import gather

# A dead actor's name is not free at once, so every incarnation gets a number of its own.
_incarnations = itertools.count(1)


class ActorTransport:
    """Reaches one engine actor; a dead actor is an EngineUnavailableError that names the engine."""

    def __init__(self, actor: ActorHandle, name: str) -> None:
        self._actor = actor
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await submit(self._actor, "engine", method, *args)
        except ray.exceptions.RayActorError as error:
            detail = " ".join(str(error).split())[:300]
            raise EngineUnavailableError(f"{self._name} died during {method}: {detail}") from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error


class EngineGroup:
    """The engines of a run. Picklable: stages on other workers reach the same actors through it."""

    __slots__ = ("_health_timeout", "_timeout", "actors")

    def __init__(self, actors: Sequence[ActorHandle], timeout: float, health_timeout: float = 30.0) -> None:
        self.actors = list(actors)
        self._timeout = timeout
        self._health_timeout = health_timeout

    def client(self) -> EngineClient:
        """A client over all engines."""
        return EngineClient(
            [ActorTransport(actor, f"engine-{index}") for index, actor in enumerate(self.actors)],
            timeout_seconds=self._timeout,
            health_timeout_seconds=self._health_timeout,
        )

    def kill(self) -> None:
        """End every engine at once."""
        for actor in self.actors:
            ray.kill(actor)


def launch_engine(config: SkyRLConfig, placement: Placement, index: int) -> tuple[ActorHandle, Any]:
    """Start engine `index` in its slot. Returns the actor and the reference of its start, still under way."""
    slot = placement.engines[index]
    actor = start_actor(
        "skyrl_core.runtime.actors:EngineActor",
        config,
        index,
        placement.device,
        name=f"engine-{index}-{next(_incarnations)}",
        # A second thread answers health and version checks while the first one generates.
        max_concurrency=2,
        **slot.actor_options(placement.device),
    )
    return actor, submit(actor, "engine", "start")


def launch_engines(config: SkyRLConfig, placement: Placement) -> tuple[EngineGroup, list[Any]]:
    """Start all engines; returns the group and the references of their starts, still under way."""
    launched = [launch_engine(config, placement, index) for index in range(len(placement.engines))]
    group = EngineGroup([actor for actor, _ in launched], config.generator.inference_engine.timeout_seconds)
    return group, [start for _, start in launched]


def wait_started(starts: Sequence[Any], timeout: float) -> None:
    """Wait for engine starts. Raises what an engine raised, or WorkerUnavailableError."""
    gather(starts, "engine", "start", timeout)

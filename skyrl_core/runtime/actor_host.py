"""The one class that runs as a Ray actor: it makes its worker in its own process.

Ray pickles an actor's class by reference, so whoever starts an actor has to import its class. A worker's imports
(torch, transformers, the model's code) take many seconds and are of no use to the flow or to a stage, so they happen
here alone.
"""

import importlib
import os
from typing import Any

import ray
from ray.actor import ActorHandle


class ActorHost:
    """Holds the worker `module:Class` and passes calls on to it."""

    def __init__(self, worker: str, *args: Any) -> None:
        module, _, name = worker.partition(":")
        self._worker = getattr(importlib.import_module(module), name)(*args)

    def pid(self) -> int:
        """Process id, for logs and for tests that kill; answers only once the worker is made."""
        return os.getpid()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the worker's `method` returns or raises."""
        return getattr(self._worker, method)(*args, **kwargs)


def start_actor(worker: str, *args: Any, **options: Any) -> ActorHandle:
    """Start an actor with the worker `module:Class` made of `args`, under Ray's actor `options`."""
    return ray.remote(ActorHost).options(**options).remote(worker, *args)


def submit(actor: ActorHandle, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call the worker's `method`; an object reference. Ray shows the call as `role.method`."""
    return actor.call.options(name=f"{role}.{method}").remote(method, *args, **kwargs)

"""A scripted engine in this process: answers from a function or a list of texts, fails on demand."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.data.carriers import StopReason
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest

Answer = tuple[Sequence[int], StopReason]
Script = Callable[[GenerationRequest, SamplingParams], Answer]


class FakeEngine:
    """Has the methods of a real engine; `script` maps a request to (token ids, stop reason).

    Log-probabilities are -0.5 for every token. `failures` maps a method's name to the exceptions that its next calls
    raise, one a call. `calls` records (method, arguments). `loaded` holds the last complete update's tensors.
    """

    def __init__(self, script: Script, *, version: int | None = 0) -> None:
        self._script = script
        self._version = version
        self._incoming: dict[str, Any] = {}
        self._running = threading.Event()
        self._running.set()
        self.loaded: dict[str, Any] = {}
        self.failures: dict[str, list[BaseException]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def _record(self, method: str, *args: Any) -> None:
        self.calls.append((method, args))
        if self.failures.get(method):
            raise self.failures[method].pop(0)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[GenerationOutput]:
        self._record("generate", requests, sampling)
        self._running.wait()
        outputs = []
        for request in requests:
            ids, reason = self._script(request, sampling)
            token_ids = np.asarray(ids, dtype=np.int64)
            outputs.append(
                GenerationOutput(
                    token_ids=token_ids,
                    logprobs=None if sampling.logprobs is None else np.full(len(token_ids), -0.5, dtype=np.float32),
                    stop_reason=reason,
                    policy_version=-1 if self._version is None else self._version,
                )
            )
        return outputs

    def version(self) -> int | None:
        self._record("version")
        return self._version

    def begin_update(self) -> None:
        self._record("begin_update")
        self._version, self._incoming = None, {}

    def load_weights(self, named: Mapping[str, Any]) -> None:
        self._record("load_weights", tuple(named))
        self._version = None
        self._incoming.update(named)

    def finish_update(self, version: int) -> None:
        self._record("finish_update", version)
        self.loaded, self._version = self._incoming, version

    def sleep(self, level: int = 1) -> None:
        self._record("sleep", level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._record("wake_up", tags)

    def pause(self) -> None:
        self._record("pause")
        self._running.clear()

    def resume(self) -> None:
        self._record("resume")
        self._running.set()

    def health(self) -> None:
        self._record("health")


def scripted_texts(tokenizer: Any, texts: Sequence[str], *, eos: bool = True) -> Script:
    """A script that answers `texts` in the order of the requests, with the end-of-sequence token and "stop" if `eos`,
    else cut off with "length"."""
    remaining = iter(texts)

    def script(request: GenerationRequest, sampling: SamplingParams) -> Answer:
        ids = list(tokenizer.encode(next(remaining), add_special_tokens=False))
        return ([*ids, tokenizer.eos_token_id], "stop") if eos else (ids, "length")

    return script

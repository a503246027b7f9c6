"""An inference engine on top of transformers: batched decoding with a KV cache, seeded per sample, weights in place."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_core.config.sampling import SamplingParams
from skyrl_core.errors import ConfigurationError, RolloutError, WeightSyncError
from skyrl_core.generators.protocol import GenerationOutput, GenerationRequest
from skyrl_core.inference.decoding import DecodedBatch, StopCheck, decode_batch
from skyrl_core.inference.stop_strings import StopStrings
from skyrl_core.inference.weights import WeightTarget

_WAKE_TAGS = ("weights", "kv_cache")


class TransformersEngine:
    """One model in this process. Plain and synchronous; a Ray actor wraps it.

    Calls may come from several threads: generation and weight loading exclude each other, and generate() waits while
    the engine is paused, so whoever wraps it needs a second thread for resume(). There is no cache between calls, hence
    nothing that new weights could leave stale.
    """

    def __init__(
        self,
        model_path: str,
        *,
        tokenizer: Any | None = None,
        device: str = "cpu",
        dtype: str = "bfloat16",
        max_batch_size: int = 256,
        trust_remote_code: bool = False,
        version: int | None = 0,
        name: str = "engine-0",
    ) -> None:
        """Load the model of `model_path`. On CPU it is fp32 whatever `dtype` says, as in the trainer.

        `tokenizer` is needed for stop strings and adds its end-of-sequence id to those of the generation
        configuration. `version` names the weights just loaded. Raises ConfigurationError when the path is no model.
        """
        from transformers import AutoModelForCausalLM

        self.name = name
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        wanted = torch.float32 if self._device.type == "cpu" else getattr(torch, dtype)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                model_path, dtype=wanted, attn_implementation="sdpa", trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{name}: cannot load a causal language model from {model_path}: {error}"
            ) from error
        self._model = model.eval().to(self._device)
        self._stop_ids = _stop_ids(self._model, tokenizer)
        self._pad_id = _pad_id(self._model, tokenizer)
        self._max_positions: int | None = getattr(self._model.config, "max_position_embeddings", None)
        self._weights = WeightTarget(self._model, name)
        self._version = version
        self._awake = set(_WAKE_TAGS)
        self._running = threading.Event()
        self._running.set()
        self._lock = threading.RLock()

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[GenerationOutput]:
        """One completion per request, in the order of the requests.

        Rows are sorted by prompt length into batches of `max_batch_size`; same requests and weights give the same
        bits. Raises WeightSyncError while an update is half done, RolloutError for a request that does not fit and for
        a model whose scores are NaN.
        """
        self._running.wait()
        with self._lock:
            version = self._check_ready()
            stop_check = self._check_requests(requests, sampling)
            order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
            outputs: list[GenerationOutput | None] = [None] * len(requests)
            for start in range(0, len(order), self._max_batch_size):
                rows = order[start : start + self._max_batch_size]
                batch = decode_batch(
                    self._model,
                    [np.ascontiguousarray(requests[row].prompt_ids, dtype=np.int64) for row in rows],
                    [requests[row].seed for row in rows],
                    sampling,
                    stop_ids=self._stop_ids,
                    stop_check=stop_check,
                    pad_id=self._pad_id,
                )
                self._check_finite(batch, version)
                for place, row in enumerate(rows):
                    length = int(batch.lengths[place])
                    outputs[row] = GenerationOutput(
                        token_ids=batch.token_ids[place, :length].copy(),
                        logprobs=None if sampling.logprobs is None else batch.logprobs[place, :length].copy(),
                        stop_reason="stop" if batch.stopped[place] else "length",
                        policy_version=version,
                    )
            return [output for output in outputs if output is not None]

    def _check_ready(self) -> int:
        if self._version is None:
            raise WeightSyncError(f"{self.name} holds a half-done weight update: finish or repeat it before generating")
        missing = [tag for tag in _WAKE_TAGS if tag not in self._awake]
        if missing:
            raise RolloutError(f"{self.name} is asleep ({', '.join(missing)}): call wake_up() before generating")
        return self._version

    def _check_requests(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> StopCheck | None:
        if sampling.additional_kwargs:
            raise ConfigurationError(
                "the transformers engine takes no sampling_params.additional_kwargs, got "
                f"{', '.join(sorted(sampling.additional_kwargs))}: remove them or use the vllm backend"
            )
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise RolloutError(f"{self.name}: the prompt of {request.session_id or 'a request'} has no tokens")
            if self._max_positions is not None and length + sampling.max_generate_length > self._max_positions:
                raise RolloutError(
                    f"{self.name}: {request.session_id or 'a request'} asks for {length} prompt tokens + "
                    f"max_generate_length {sampling.max_generate_length}, more than the model's {self._max_positions} "
                    "positions: lower max_generate_length or max_prompt_length"
                )
        if not sampling.stop:
            return None
        if self._tokenizer is None:
            raise ConfigurationError(f"{self.name}: sampling_params.stop needs a tokenizer in the engine")
        return StopStrings(self._tokenizer, sampling.stop)

    def _check_finite(self, batch: DecodedBatch, version: int) -> None:
        """A drawn token's log-probability is finite, unless the model's scores were not."""
        if not np.isfinite(batch.logprobs).all():
            raise RolloutError(
                f"{self.name}: the model of policy version {version} gives scores that are NaN or infinite, so its "
                "weights are broken: go back to a checkpoint from before, with a lower learning rate"
            )

    def version(self) -> int | None:
        """The version of the weights held; None while an update is half done."""
        return self._version

    def begin_update(self) -> None:
        """Start a new weight update: what an earlier, unfinished one loaded counts no more."""
        with self._lock:
            self._check_weights_awake()
            self._version = None
            self._weights.begin()

    def load_weights(self, named: Mapping[str, Tensor]) -> None:
        """Copy full tensors under their Hugging Face names. Raises WeightSyncError naming what is wrong."""
        with self._lock:
            self._check_weights_awake()
            self._version = None
            self._weights.load(named)

    def _check_weights_awake(self) -> None:
        if "weights" not in self._awake:
            raise WeightSyncError(f'{self.name} is asleep: call wake_up(["weights"]) before sending weights')

    def finish_update(self, version: int) -> None:
        """Name the loaded weights `version`. Raises WeightSyncError naming parameters that were not sent."""
        with self._lock:
            self._weights.check_complete()
            self._version = version

    def sleep(self, level: int = 1) -> None:
        """Free the accelerator: level 1 moves the weights to the host, level 2 drops them (version None until the next
        update). On CPU there is nothing to free: weights and version stay."""
        with self._lock:
            self._awake.clear()
            if self._device.type == "cpu":
                return
            if level >= 2:
                self._version = None
                self._weights.drop()
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the accelerator back; `tags` ("weights", "kv_cache") limits it to one of them."""
        wanted = _WAKE_TAGS if tags is None else tuple(tags)
        unknown = [tag for tag in wanted if tag not in _WAKE_TAGS]
        if unknown:
            raise ConfigurationError(f"wake_up knows the tags {', '.join(_WAKE_TAGS)}, got {', '.join(unknown)}")
        with self._lock:
            if "weights" in wanted and "weights" not in self._awake:
                self._weights.restore()
                self._model.to(self._device)
            self._awake.update(wanted)

    def pause(self) -> None:
        """Hold new generate() calls until resume()."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def health(self) -> None:
        """Returns when the engine answers."""


def _stop_ids(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """End-of-sequence ids of the generation configuration and the tokenizer."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            ids.update([value] if isinstance(value, int) else value)
    return tuple(sorted(ids))


def _pad_id(model: Any, tokenizer: Any | None) -> int:
    """Any valid id will do: padding is masked, never attended to."""
    for source in (tokenizer, model.config):
        value = getattr(source, "pad_token_id", None)
        if isinstance(value, int):
            return value
    return 0

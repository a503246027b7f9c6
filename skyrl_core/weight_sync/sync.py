"""Weights from trainer to engines, whole tensors by reference: the strategy that works for every engine we have."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_core.errors import SkyRLError, WeightSyncError
from skyrl_core.generators.protocol import InferenceClient


async def sync_weights(export: Callable[[], Sequence[Any]], client: InferenceClient, version: int) -> None:
    """Export the trainer's weights and load them into every engine as `version`.

    `export` blocks and returns buckets, or handles of buckets. Engines hold no version while they load.
    Raises WeightSyncError when an engine refuses, EngineUnavailableError when one died.
    """
    buckets = await asyncio.to_thread(export)
    if not buckets:
        raise WeightSyncError(f"the trainer exported no weights for version {version}")
    try:
        await client.update_weights(buckets, version)
    except SkyRLError:
        raise
    except Exception as error:
        raise WeightSyncError(
            f"weights of version {version} did not arrive: {type(error).__name__}: {error}"
        ) from error

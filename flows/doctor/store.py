"""Checks of what a configuration names: store, data, model, trackers, features."""

import os
import secrets
import time

from flows.doctor.machine import existing_parent
from flows.doctor.report import Status
from flows.preflight import check_data_files
from flows.settings import store_variables
from skyrl_core.config import SkyRLConfig
from skyrl_core.data.object_storage import ObjectStorage
from skyrl_core.data.storage import Storage, open_storage
from skyrl_core.data.tokenizer import check_model_path
from skyrl_core.recipes.ensure import recipe_missing

Answer = tuple[Status, str, str]
LEASE_SECONDS = 60.0
_NOTICEABLE_SECONDS = 5.0
_PATIENCE_SECONDS = 3.0


def check_configuration(config: SkyRLConfig) -> Answer:
    """Nothing that this version cannot run. Raises ConfigurationError that lists what it cannot."""
    config.check_runnable()
    return "ok", "every key can be run by this version", ""


def check_run_store(config: SkyRLConfig) -> Answer:
    """The store of runs and checkpoints, with the credentials a run would have. Raises ConfigurationError."""
    if config.flow.store_block is not None:
        os.environ.update(store_variables(config.flow.store_block))
    return check_store(config.trainer.ckpt_path)


def check_store(root: str) -> Answer:
    """The store can be written, read, listed and deleted in, and an object be created at most once."""
    if "://" not in root:
        # A run makes the folder; looking at it must not.
        root = str(existing_parent(root))
    storage = open_storage(root)
    if isinstance(storage, ObjectStorage):
        storage.patience_seconds = _PATIENCE_SECONDS
    try:
        return _try_out(storage, f".doctor-{secrets.token_hex(6)}")
    except OSError as error:
        return "fail", f"{storage.uri}: {error}", _store_advice(storage)


def _try_out(storage: Storage, folder: str) -> Answer:
    content = secrets.token_bytes(1024)
    try:
        storage.make_folder(folder)
        storage.write(f"{folder}/written", content)
        now = time.time()
        if storage.read(f"{folder}/written") != content or storage.names(folder) != ["written"]:
            return "fail", f"{storage.uri}: what was written is not what is read", "use a store with strong consistency"
        first, second = (storage.create(f"{folder}/once", value) for value in (b"first", b"second"))
        if (first, second) != (True, False) or storage.read(f"{folder}/once") != b"first":
            text = f"{storage.uri}: creating an object twice is not refused, so two runs could write one run name"
            return "fail", text, "use a store that honours If-None-Match (AWS S3, SeaweedFS, MinIO, Ceph)"
        skew = storage.modified(f"{folder}/written") - now
    finally:
        storage.remove_tree(folder)
    if storage.files(folder):
        return "fail", f"{storage.uri}: objects cannot be deleted", "allow this user to delete"
    return _judge_clock(storage.uri, skew)


def _judge_clock(uri: str, skew: float) -> Answer:
    """Machines that share a store tell living from dead writers by heartbeats: clocks must agree within the ttl."""
    text = f"{uri}: write, read, create once, delete work"
    if abs(skew) < _NOTICEABLE_SECONDS:
        return "ok", text, ""
    side = "behind" if skew > 0 else "ahead of"
    text = f"{text}, but this machine's clock is {abs(skew):.0f} s {side} the store's"
    status: Status = "fail" if abs(skew) >= LEASE_SECONDS / 2 else "warn"
    return status, text, f"set the clock (NTP): leases of runs hold for {LEASE_SECONDS:.0f} s"


def _store_advice(storage: Storage) -> str:
    if isinstance(storage, ObjectStorage):
        where = os.environ.get("AWS_ENDPOINT_URL") or "the provider's own"
        return f"check that the server runs, AWS_ENDPOINT_URL (now {where}), the AWS_* credentials, and the bucket"
    return "give this user the right to write there, or name another trainer.ckpt_path"


def check_data(config: SkyRLConfig) -> Answer:
    """Data files are there, or a recipe will make them."""
    data = config.data
    if recipe_missing(config):
        return "ok", f"made at the first start by data.recipe={data.recipe}", ""
    check_data_files("data.train_data", data.train_data)
    if config.trainer.eval_interval > 0:
        check_data_files("data.val_data", data.val_data)
    return "ok", ", ".join((*data.train_data, *data.val_data)), ""


def check_model(config: SkyRLConfig) -> Answer:
    """The policy's model is a usable folder, or a name for the hub."""
    path = config.trainer.policy.model.path
    if path is None:
        return "fail", "trainer.policy.model.path is not set", "set it to a model folder or a Hugging Face name"
    if recipe_missing(config):
        return "ok", f"made at the first start by data.recipe={config.data.recipe}", ""
    check_model_path(path)
    if os.path.isdir(os.path.expanduser(path)):
        return "ok", path, ""
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        text = f"{path} is a Hugging Face name and HF_HUB_OFFLINE=1: it must be in the local cache"
        return "warn", text, "download it once with `hf download`, or name a folder"
    return "ok", f"{path}, from the Hugging Face hub at the start", ""


def check_tracker(config: SkyRLConfig) -> Answer:
    """Trackers exist and somebody is logged in. Raises ConfigurationError that says what to do."""
    from skyrl_core.tracking.build import check_trackers

    check_trackers(config)
    return "ok", ", ".join(config.trainer.loggers), ""

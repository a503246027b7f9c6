"""What the doctor says of store, clock, model, data and trackers."""

import os
import uuid
from pathlib import Path

import pytest

from flows.doctor import store
from skyrl_core.config import load_config
from skyrl_core.data.object_storage import ObjectStorage
from skyrl_core.data.storage import LocalStorage
from skyrl_core.errors import ConfigurationError, DatasetError


def test_a_good_local_store_is_left_as_it_was_and_not_made(tmp_path: Path) -> None:
    status, message, _ = store.check_store(str(tmp_path / "not" / "yet"))
    assert (status, message) == ("ok", f"{tmp_path}: write, read, create once, delete work")
    assert list(tmp_path.iterdir()) == []


def test_a_good_object_store() -> None:
    assert store.check_store(f"memory://{uuid.uuid4().hex}")[0] == "ok"


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(LocalStorage, "make_folder", refuse)
    monkeypatch.setattr(LocalStorage, "remove_tree", lambda *_: None)
    status, message, advice = store.check_store(str(tmp_path))
    assert status == "fail"
    assert str(tmp_path) in message
    assert "trainer.ckpt_path" in advice


def test_a_store_in_which_an_object_can_be_created_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: ObjectStorage, path: str, data: bytes) -> bool:
        self.publish(path, data)
        return True

    monkeypatch.setattr(ObjectStorage, "create", overwrite)
    status, message, advice = store.check_store(f"memory://{uuid.uuid4().hex}")
    assert status == "fail"
    assert "two runs could write one run name" in message
    assert "If-None-Match" in advice


@pytest.mark.parametrize(
    ("skew", "status", "words"),
    [(3.0, "ok", ""), (-12.0, "warn", "12 s ahead of the store's"), (45.0, "fail", "45 s behind the store's")],
)
def test_clocks_are_compared_with_the_store(
    skew: float, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modified = LocalStorage.modified
    monkeypatch.setattr(LocalStorage, "modified", lambda self, path: modified(self, path) + skew)
    found = store.check_store(str(tmp_path))
    assert found[0] == status
    assert words in found[1]


def test_modification_times_of_both_kinds_of_storage_are_seconds_since_1970(tmp_path: Path) -> None:
    local = LocalStorage(tmp_path)
    local.write("file", b"x")
    os.utime(tmp_path / "file", (1_700_000_000, 1_700_000_000))
    assert local.modified("file") == 1_700_000_000
    remote = ObjectStorage(f"memory://{uuid.uuid4().hex}")
    remote.write("file", b"x")
    assert remote.modified("file") > 1_700_000_000


def test_a_model_that_is_not_set_or_not_there(tmp_path: Path) -> None:
    assert store.check_model(load_config(None, ["trainer.policy.model.path=null"]))[:2] == (
        "fail",
        "trainer.policy.model.path is not set",
    )
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        store.check_model(load_config(None, [f"trainer.policy.model.path={tmp_path}"]))


def test_a_hub_name_is_questioned_when_the_hub_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["trainer.policy.model.path=some/model"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert store.check_model(config)[0] == "warn"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert store.check_model(config)[0] == "ok"


def test_missing_data_are_named_and_a_recipe_makes_them(tmp_path: Path) -> None:
    words = [f"data.train_data=['{tmp_path}/train.parquet']", f"data.val_data=['{tmp_path}/test.parquet']"]
    with pytest.raises(DatasetError, match=r"train\.parquet does not exist"):
        store.check_data(load_config(None, words))
    assert "data.recipe=arithmetic" in store.check_data(load_config(None, [*words, "data.recipe=arithmetic"]))[1]


def test_a_tracker_nobody_is_logged_in_to_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    import wandb

    wandb.teardown()
    with pytest.raises(ConfigurationError, match="wandb login"):
        store.check_tracker(load_config(None, ["trainer.logger=wandb"]))
    wandb.teardown()
    assert store.check_tracker(load_config(None, ["trainer.logger=console"]))[:2] == ("ok", "console")


def test_a_feature_that_is_missing_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.strategy=megatron"):
        store.check_configuration(load_config(None, ["trainer.strategy=megatron"]))

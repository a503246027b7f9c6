"""A policy saved and loaded goes on bit for bit; broken files are named, never loaded; nothing is unpickled."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from skyrl_core.errors import CheckpointError, CorruptCheckpointError, StateMismatchError
from skyrl_core.training.sharded_state import ShardReader, read_policy_weights

RANK_FILE = "rank_00000_of_00001.safetensors"


@pytest.fixture
def update(make_batch, trajectories):
    def take(worker, step):
        return worker.update(make_batch(trajectories(seed=step), step=step), step, f"batch {step}")

    return take


@pytest.fixture
def saved(make_policy, update, folder):
    """A worker at version 2 and the folder it was saved to."""
    worker = make_policy()
    update(worker, 1)
    update(worker, 2)
    worker.save(folder, 2)
    return worker


def same_bits(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("optimizer", [{"num_warmup_steps": 9}, {"scheduler": "inverse_sqrt", "num_warmup_steps": 2}])
def test_three_updates_after_loading_equal_those_without_interruption_bit_for_bit(
    make_policy, update, folder, weights_of, optimizer
):
    uninterrupted = make_policy(optimizer=optimizer)
    update(uninterrupted, 1)
    uninterrupted.save(folder, 1)
    expected = [update(uninterrupted, step) for step in (2, 3, 4)]
    resumed = make_policy(optimizer=optimizer)
    resumed.load(folder)
    assert resumed.status() == (1, "batch 1")
    assert [update(resumed, step) for step in (2, 3, 4)] == expected
    assert same_bits(weights_of(resumed), weights_of(uninterrupted))


def test_loading_into_the_same_worker_undoes_later_updates(saved, update, folder, weights_of):
    weights = weights_of(saved)
    update(saved, 3)
    assert not same_bits(weights_of(saved), weights)
    saved.load(folder)
    assert saved.version() == 2
    assert same_bits(weights_of(saved), weights)


def test_a_start_model_without_optimizer_state_resumes_too(make_policy, update, folder, weights_of):
    worker = make_policy()
    worker.save(folder, 0)
    first = update(worker, 1)
    other = make_policy()
    update(other, 1)
    other.load(folder)
    assert other.version() == 0
    assert update(other, 1) == first
    assert same_bits(weights_of(other), weights_of(worker))


def test_last_update_is_remembered_across_a_restart(saved, make_policy, update, folder):
    expected = update(saved, 2)
    resumed = make_policy()
    resumed.load(folder)
    assert update(resumed, 2) == expected


def test_loading_weights_only_begins_the_optimizer_anew(saved, make_policy, folder, weights_of):
    fresh = make_policy(optimizer={"num_warmup_steps": 10})
    fresh.load(folder, optimizer=False)
    assert fresh.version() == 2
    assert same_bits(weights_of(fresh), weights_of(saved))
    assert not fresh.optimizer.state
    assert fresh._counters.optimizer_steps == 0


def test_random_state_is_restored(saved, make_policy, folder):
    expected = torch.rand(3)
    resumed = make_policy()
    torch.manual_seed(99)
    resumed.load(folder)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_can_be_read_and_used_without_a_process_group(
    make_policy, update, folder, weights_of, model_path, untied_model_path, tied
):
    worker = make_policy(path=model_path if tied else untied_model_path)
    update(worker, 1)
    worker.save(folder, 1)
    weights = read_policy_weights(folder)
    assert same_bits(weights, weights_of(worker))
    assert ("lm_head.weight" in weights) is not tied
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(f"{folder}/policy/huggingface"))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if tied else [])
    ids = torch.tensor([[8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, worker.model(input_ids=ids).logits, atol=1e-6, rtol=0)


def test_tokenizer_and_configuration_are_saved_beside_the_weights(saved, folder, model_path):
    kept = AutoTokenizer.from_pretrained(f"{folder}/policy/huggingface")
    assert kept.get_vocab() == AutoTokenizer.from_pretrained(model_path).get_vocab()
    assert kept.chat_template == AutoTokenizer.from_pretrained(model_path).chat_template
    assert AutoConfig.from_pretrained(f"{folder}/policy/huggingface").architectures == ["Qwen3ForCausalLM"]


def test_only_the_present_version_can_be_saved(saved, folder):
    with pytest.raises(StateMismatchError, match="step 3 needs policy version 3, and rank 0 has 2"):
        saved.save(folder, 3)


def test_cut_short_file_is_named_and_leaves_no_version(saved, make_policy, folder):
    path = Path(folder) / "policy" / RANK_FILE
    path.write_bytes(path.read_bytes()[:-10])
    worker = make_policy()
    with pytest.raises(CorruptCheckpointError, match=f"{RANK_FILE} is missing, cut short or altered"):
        worker.load(folder)
    assert worker.version() is None
    with pytest.raises(CorruptCheckpointError):
        read_policy_weights(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 7, "world_size": 1}', '{"format": 1}'])
def test_garbled_state_file_is_corrupt(saved, folder, content):
    (Path(folder) / "policy" / "state.json").write_text(content)
    with pytest.raises(CorruptCheckpointError, match=r"state\.json"):
        saved.load(folder)


def test_state_file_without_counters_is_corrupt(saved, folder):
    path = Path(folder) / "policy" / "state.json"
    path.write_text(json.dumps({"format": 1, "world_size": 1}))
    with pytest.raises(CorruptCheckpointError, match=r"state\.json lacks or garbles"):
        saved.load(folder)


def test_missing_rank_file_and_missing_folder_are_told_apart(saved, folder):
    (Path(folder) / "policy" / RANK_FILE).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{RANK_FILE} is missing"):
        saved.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"holds no saved policy: state\.json is missing"):
        saved.load(folder)


def test_checkpoint_of_another_model_is_refused(saved, make_policy, folder, untied_model_path):
    with pytest.raises(CheckpointError, match=r"has no model/lm_head\.weight; it was saved from another model"):
        make_policy(path=untied_model_path).load(folder)


def test_pickle_in_place_of_a_file_is_refused_unread(saved, folder, tmp_path):
    proof = tmp_path / "proof"

    class Payload:
        def __reduce__(self):
            return (proof.touch, ())

    for name in (RANK_FILE, "state.json"):
        path = Path(folder) / "policy" / name
        kept = path.read_bytes()
        path.write_bytes(pickle.dumps(Payload()))
        with pytest.raises(CorruptCheckpointError):
            saved.load(folder)
        path.write_bytes(kept)
    assert not proof.exists()


def test_unwritable_folder_fails_the_save_by_name(saved, tmp_path):
    (tmp_path / "blocked").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match=r"rank\(s\) \[0\] could not write the policy"):
        saved.save(str(tmp_path / "blocked"), 2)
    assert saved.version() == 2


def test_export_gives_every_weight_once_in_buckets_of_the_asked_size(make_policy, model_path):
    buckets = list(make_policy().export_weights(bucket_bytes=2000))
    expected = load_file(f"{model_path}/model.safetensors")
    names = [name for bucket in buckets for name in bucket]
    assert len(names) == len(set(names))
    exported = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    assert same_bits(exported, expected)
    sizes = [[tensor.nbytes for tensor in bucket.values()] for bucket in buckets]
    assert all(sum(bucket) <= 2000 or len(bucket) == 1 for bucket in sizes)
    assert any(len(bucket) > 1 for bucket in sizes)
    assert all(tensor.is_contiguous() for tensor in exported.values())


def test_pieces_of_any_cut_are_read_back(tmp_path):
    """Three writers held uneven rows of a [5, 2] matrix; readers want other rows."""
    whole = torch.arange(10.0).view(5, 2)
    for rank, (start, stop) in enumerate([(0, 2), (2, 3), (3, 5)]):
        layout = json.dumps({"model/w": {"whole": [5, 2], "offset": [start, 0]}})
        path = tmp_path / f"rank_{rank:05d}_of_00003.safetensors"
        save_file({"model/w": whole[start:stop].contiguous()}, str(path), metadata={"layout": layout})
    with ShardReader(tmp_path, 3) as reader:
        target = torch.zeros(5, 2)
        reader.read_into("model/w", target)
        assert torch.equal(target, whole)
        with pytest.raises(CheckpointError, match=r"model/w has shape \(5, 2\) and the model's has \(4, 2\)"):
            reader.read_into("model/w", torch.zeros(4, 2))
    (tmp_path / "rank_00001_of_00003.safetensors").write_bytes(
        (tmp_path / "rank_00000_of_00003.safetensors").read_bytes()
    )
    with ShardReader(tmp_path, 3) as reader, pytest.raises(CorruptCheckpointError, match="12 of 10 values of model/w"):
        reader.read_into("model/w", torch.zeros(5, 2))

"""Program of the tests of several ranks: forks them after one import, and writes what they computed into a folder.

    several_ranks.py FOLDER WORLD_SIZE ...

FOLDER holds config.json, variants.json (changes of trainer.algorithm), batch_1.npz to batch_4.npz, broken.npz (a NaN
advantage) and one/ (a checkpoint of one rank at version 2). Results go to FOLDER/of_N/.
"""

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from skyrl_core.config import SkyRLConfig
from skyrl_core.data.carriers import TrainingBatch
from skyrl_core.errors import SkyRLError
from skyrl_core.training.worker import PolicyWorker


def read_batch(path: Path) -> TrainingBatch:
    with np.load(path) as arrays:
        values = dict(arrays)
    numbers = {name: int(values.pop(name)) for name in ("step", "prompt_width")}
    return TrainingBatch(**numbers, **values)


def write_weights(worker: PolicyWorker, path: Path) -> None:
    weights = {name: tensor for bucket in worker.export_weights(1500) for name, tensor in bucket.items()}
    if worker.rank == 0:
        save_file(weights, str(path))
    else:
        assert not weights


def error_of(call, *arguments) -> str:
    try:
        call(*arguments)
    except SkyRLError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def run(rank: int, world_size: int, folder: Path, ports: list[tuple[Connection, Connection]]) -> None:
    torch.set_num_threads(1)
    results = folder / f"of_{world_size}"
    batches = {step: read_batch(folder / f"batch_{step}.npz") for step in (1, 2, 3, 4)}
    config = SkyRLConfig.model_validate(json.loads((folder / "config.json").read_text()))
    worker = PolicyWorker(config, rank, world_size)
    if rank == 0:
        meeting = worker.rendezvous()
        for _, sender in ports[1:]:
            sender.send(meeting)
    else:
        meeting = ports[rank][0].recv()
    worker.setup(*meeting, "cpu")

    rows, values = worker.logprobs(batches[1])
    np.savez(results / f"logprobs_{rank}.npz", rows=rows, values=values)

    measured = [dict(worker.update(batches[step], step, str(step)).metrics) for step in (1, 2)]
    worker.save(str(results / "two"), 2)
    measured.append(dict(worker.update(batches[3], 3, "3").metrics))
    write_weights(worker, results / "weights_3.safetensors")
    measured.append(dict(worker.update(batches[4], 4, "4").metrics))
    write_weights(worker, results / "weights_4.safetensors")

    worker.load(str(results / "two"))
    resumed = dict(worker.update(batches[3], 3, "3").metrics)
    write_weights(worker, results / "resumed_3.safetensors")

    worker.load(str(folder / "one"))
    from_one = dict(worker.update(batches[3], 3, "3").metrics)
    write_weights(worker, results / "from_one_3.safetensors")

    varied = []
    for number, changes in enumerate(json.loads((folder / "variants.json").read_text())):
        values = config.model_dump()
        values["trainer"]["algorithm"].update(changes)
        other = PolicyWorker(SkyRLConfig.model_validate(values), rank, world_size)
        other.setup(*meeting, "cpu")
        varied.append(dict(other.update(batches[1], 1, "1").metrics))
        write_weights(other, results / f"variant_{number}.safetensors")

    (results / "blocked" / "policy" / f"rank_00001_of_{world_size:05d}.safetensors").mkdir(parents=True, exist_ok=True)
    errors = {
        "save": error_of(worker.save, str(results / "blocked"), 3),
        "update": error_of(worker.update, read_batch(folder / "broken.npz"), 4, "broken"),
        "version": str(worker.version()),
    }
    report = {"metrics": measured, "resumed": resumed, "from_one": from_one, "varied": varied, "errors": errors}
    (results / f"report_{rank}.json").write_text(json.dumps(report))


def run_world(folder: Path, world_size: int) -> int:
    """Fork the ranks of one group and wait for them. Returns the worst exit code."""
    (folder / f"of_{world_size}").mkdir()
    context = multiprocessing.get_context("fork")
    ports = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [context.Process(target=run, args=(rank, world_size, folder, ports)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(max(run_world(Path(sys.argv[1]), int(size)) for size in sys.argv[2:]))

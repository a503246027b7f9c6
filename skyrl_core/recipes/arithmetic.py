"""The quick start's data and model: two-digit additions in SkyRL's dataset format, and a model that solves some."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from skyrl_core.data.carriers import Message
from skyrl_core.data.seeds import derive_seed
from skyrl_core.recipes.arithmetic_model import Progress, WarmUp, save_model
from skyrl_core.recipes.folder import make_folder

Problem = tuple[int, int]

TRAIN_FILE = "train.parquet"
TEST_FILE = "test.parquet"
MODEL_FOLDER = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSettings:
    """What decides the content of the folder: sizes of the two disjoint sets of problems, seed, and warm-up."""

    train_size: int = 5120
    test_size: int = 200
    seed: int = 0
    warm_up: WarmUp = dataclasses.field(default_factory=WarmUp)


def question(problem: Problem) -> str:
    """`12+34=`."""
    return f"{problem[0]:02d}+{problem[1]:02d}="


def solution(problem: Problem) -> str:
    """The sum of the units, the sum of the tens with the carry, then the answer: 38+45 is worked as `13,08;83`."""
    units = problem[0] % 10 + problem[1] % 10
    tens = problem[0] // 10 + problem[1] // 10 + units // 10
    return f"{units:02d},{tens:02d};{sum(problem)}"


def draw_problems(settings: ArithmeticSettings) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems: each of the 10,000 additions at most once, in shuffled order."""
    words = np.random.Philox(key=derive_seed(settings.seed, "arithmetic", "problems")).random_raw(10_000)
    numbers = np.argsort(words, kind="stable")[: settings.train_size + settings.test_size]
    problems = [(int(number) // 100, int(number) % 100) for number in numbers]
    return problems[settings.test_size :], problems[: settings.test_size]


def to_rows(problems: list[Problem], split: str) -> list[dict[str, Any]]:
    """Rows in SkyRL's format, one user message each."""
    return [
        {
            "data_source": "arithmetic",
            "prompt": _messages(problem),
            "env_class": "arithmetic",
            "reward_spec": {"method": "rule", "ground_truth": str(sum(problem))},
            "extra_info": {"split": split, "index": index, "solution": solution(problem)},
        }
        for index, problem in enumerate(problems)
    ]


def ensure_arithmetic(
    folder: str | Path,
    *,
    settings: ArithmeticSettings | None = None,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> bool:
    """Make `folder` with train.parquet, test.parquet and model/ unless it is there; True when it was made now.

    The same settings give the same files on the same machine and library versions. The folder appears complete or not
    at all; see `make_folder` for `force` and the errors.
    """
    chosen = settings or ArithmeticSettings()

    def build(partial: Path) -> dict[str, Any]:
        train, test = draw_problems(chosen)
        _write_parquet(partial / TRAIN_FILE, to_rows(train, "train"))
        _write_parquet(partial / TEST_FILE, to_rows(test, "test"))
        examples = [(_messages(problem), solution(problem)) for problem in train]
        save_model(partial / MODEL_FOLDER, examples, chosen.warm_up, progress)
        return {"recipe": "arithmetic", "settings": dataclasses.asdict(chosen)}

    _, made = make_folder(Path(folder), build, force=force)
    return made


def _messages(problem: Problem) -> list[Message]:
    return [{"role": "user", "content": question(problem)}]


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

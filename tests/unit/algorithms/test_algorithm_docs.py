"""docs/algorithms.md has a row for everything that can be configured, with a link to its source."""

import re
from pathlib import Path

import pytest

from skyrl_core.algorithms.registry import list_advantage_estimators, list_policy_losses
from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig
from skyrl_core.config.algorithm_rules import KL_ESTIMATORS, REDUCTIONS

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table whose first column is called `heading`, by their first cell."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} "))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        rows[cells[0].strip("`")] = cells
    return rows


def test_every_advantage_estimator_has_formula_and_paper() -> None:
    rows = table("`advantage_estimator`")
    assert sorted(rows) == list_advantage_estimators()
    for name, cells in rows.items():
        assert cells[1], name
        assert re.search(r"\(https://arxiv\.org/abs/\d{4}\.\d{5}\)", cells[2]), name
        assert cells[3], name


def test_every_policy_loss_has_a_formula() -> None:
    rows = table("`policy_loss_type`")
    assert sorted(rows) == list_policy_losses()
    for name, cells in rows.items():
        assert cells[1], name
        assert cells[3], name


def test_every_reduction_and_kl_estimator_has_a_row() -> None:
    assert sorted(table("`loss_reduction`")) == sorted(REDUCTIONS)
    assert sorted(table("`kl_estimator_type`")) == sorted(KL_ESTIMATORS)


DEPRECATED_OR_ELSEWHERE = {"tis_imp_ratio_cap", "use_tis", "temperature", "value_head_prefix"}


@pytest.mark.parametrize("key", sorted(set(AlgorithmConfig.model_fields) - DEPRECATED_OR_ELSEWHERE))
def test_every_key_of_the_section_is_mentioned(key: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    symbol = {"gamma": "γ", "lambd": "λ"}.get(key, key)
    assert symbol in text


@pytest.mark.parametrize("key", sorted(OffPolicyCorrectionConfig.model_fields))
def test_every_key_of_the_correction_is_mentioned(key: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert key.removesuffix("_low").removesuffix("_high") in text

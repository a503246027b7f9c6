"""Off-policy correction and mismatch metrics, worked out on paper; its formulas are held to plain loops elsewhere."""

import math

import pytest
import torch

from skyrl_core.algorithms.off_policy import correction_metrics, correction_weights, mismatch_metrics
from skyrl_core.config.algorithm import OffPolicyCorrectionConfig
from skyrl_core.errors import ConfigurationError

RATIOS = torch.tensor([[2.0, 2.0, 9.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
ROLLOUT = torch.full((3, 3), -1.0, dtype=torch.float64)
OLD = ROLLOUT + RATIOS.log()
"""Rows: product 4, geometric mean 2 (the 9 is masked); product ½, geometric mean 0.7937; no trained token."""


def weights(**settings: object) -> list[list[float]]:
    result = correction_weights(OLD, ROLLOUT, MASK, OffPolicyCorrectionConfig(**settings))
    assert result is not None
    return [[round(x, 6) for x in row] for row in result.tolist()]


def test_nothing_is_done_when_nothing_is_switched_on() -> None:
    assert correction_weights(OLD, None, MASK, OffPolicyCorrectionConfig()) is None
    assert correction_metrics(OLD, ROLLOUT, MASK, OffPolicyCorrectionConfig()) == {}


def test_token_weights_are_truncated_above_only() -> None:
    kept = weights(tis_ratio_type="token", token_tis_ratio_clip_high=1.5)
    assert kept == [[1.5, 1.5, 0.0], [0.5, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_sequence_weights_are_the_product_of_trained_tokens() -> None:
    kept = weights(tis_ratio_type="sequence", sequence_tis_ratio_clip_high=3.0)
    assert kept == [[3.0, 3.0, 0.0], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_product_mask_leaves_out_whole_rows() -> None:
    assert weights(sequence_mask_metric="product", product_mask_low=0.4, product_mask_high=3.0) == [
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0],
    ]


def test_geometric_mask_leaves_out_whole_rows() -> None:
    assert weights(sequence_mask_metric="geometric", geo_mask_low=0.8, geo_mask_high=2.5) == [
        [1.0, 1.0, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]


def test_one_outlier_costs_its_row_and_works_without_another_correction() -> None:
    assert weights(outlier_token_is_threshold_low=0.6) == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert weights(outlier_token_is_threshold_high=1.9) == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_the_token_mask_costs_the_token_only() -> None:
    assert weights(token_mask_is_threshold_low=0.6, token_mask_is_threshold_high=1.9) == [
        [0.0, 0.0, 0.0],
        [0.0, 1.0, 1.0],
        [0.0, 0.0, 0.0],
    ]


def test_masks_and_weights_go_together() -> None:
    """The second row is inside the product's bounds; its first token is masked, and still counts in its product."""
    assert weights(
        tis_ratio_type="sequence",
        sequence_mask_metric="product",
        product_mask_low=0.4,
        product_mask_high=3.0,
        token_mask_is_threshold_low=0.6,
    ) == [[0.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]


def test_missing_logprobs_name_the_key_that_brings_them() -> None:
    with pytest.raises(ConfigurationError, match=r"generator\.sampling_params\.logprobs=1"):
        correction_weights(OLD, None, MASK, OffPolicyCorrectionConfig(tis_ratio_type="token"))


def test_metrics_count_trained_tokens_and_rows_that_have_some() -> None:
    """Ratios 2, 2, 0.5, 1, 1: mean 1.3, deviation sqrt((0.49·2 + 0.64 + 0.09·2) / 5) = 0.6. Above 1.5: 2 of 5 tokens.
    Products 4 and ½ in (0.6, 3): one over, one under, of two rows."""
    correction = OffPolicyCorrectionConfig(
        tis_ratio_type="token",
        token_tis_ratio_clip_high=1.5,
        sequence_mask_metric="product",
        product_mask_low=0.6,
        product_mask_high=3.0,
        outlier_token_is_threshold_low=0.6,
        token_mask_is_threshold_high=1.9,
    )
    assert correction_metrics(OLD, ROLLOUT, MASK, correction) == pytest.approx(
        {
            "is_ratio_mean": 1.3,
            "is_ratio_std": 0.6,
            "is_ratio_max": 2.0,
            "is_ratio_min": 0.5,
            "tis_token_clip_high_ratio": 0.4,
            "product_sequence_mask_masked_ratio": 1.0,
            "product_sequence_mask_over_high_ratio": 0.5,
            "product_sequence_mask_under_low_ratio": 0.5,
            "outlier_seq_masked_ratio": 0.5,
            "outlier_seq_over_high_ratio": 0.0,
            "outlier_seq_under_low_ratio": 0.5,
            "token_mask_masked_ratio": 0.4,
            "token_mask_over_high_ratio": 0.4,
            "token_mask_under_low_ratio": 0.0,
        }
    )


def test_metrics_of_sequence_weights_and_the_geometric_mask() -> None:
    correction = OffPolicyCorrectionConfig(
        tis_ratio_type="sequence", sequence_tis_ratio_clip_high=3.0, sequence_mask_metric="geometric"
    )
    metrics = correction_metrics(OLD, ROLLOUT, MASK, correction)
    assert metrics["tis_seq_clip_high_ratio"] == 0.5
    assert metrics["geo_sequence_mask_masked_ratio"] == 1.0
    nothing = torch.zeros_like(MASK)
    assert correction_metrics(OLD, ROLLOUT, nothing, correction) == {}


def test_mismatch_is_measured_on_trained_tokens() -> None:
    """|log r| = ln 2, ln 2, ln 2, 0, 0 (2, 2, ½, 1, 1): mean 0.6·ln 2. Probabilities: rollout e^-1, old 2/e, 2/e,
    ½/e, 1/e, 1/e: differences (1 + 1 + ½) / e. k1 of KL(rollout ‖ old): -ln r: mean (-1 - 1 + 1)·ln 2 / 5.
    k3: r - ln r - 1: (2·(1 - ln 2) + (ln 2 - ½)) / 5."""
    old = OLD.clone()
    old[0, 2] = math.nan
    log2 = math.log(2)
    assert mismatch_metrics(old, ROLLOUT, MASK) == pytest.approx(
        {
            "logprob_diff_mean": 0.6 * log2,
            "logprob_diff_max": log2,
            "prob_diff_mean": 2.5 / math.e / 5,
            "prob_diff_max": 1 / math.e,
            "kl_k1": -log2 / 5,
            "kl_k3": (2 * (1 - log2) + (log2 - 0.5)) / 5,
        }
    )
    assert mismatch_metrics(OLD, ROLLOUT, torch.zeros_like(MASK)) == {}


def test_masks_without_weights_report_themselves_alone() -> None:
    metrics = correction_metrics(OLD, ROLLOUT, MASK, OffPolicyCorrectionConfig(token_mask_is_threshold_low=0.6))
    assert metrics["token_mask_masked_ratio"] == pytest.approx(0.2)
    assert not [name for name in metrics if name.startswith("tis_")]


@pytest.mark.parametrize(
    "bounds",
    [
        {"token_mask_is_threshold_low": 1.0, "token_mask_is_threshold_high": 1.0},
        {"outlier_token_is_threshold_low": 1.0, "outlier_token_is_threshold_high": 1.0},
        {"sequence_mask_metric": "product", "product_mask_low": 1.0, "product_mask_high": 1.0},
        {"sequence_mask_metric": "geometric", "geo_mask_low": 1.0, "geo_mask_high": 1.0},
    ],
)
def test_a_ratio_on_its_bound_is_kept(bounds: dict[str, object]) -> None:
    same = torch.full((1, 2), -1.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = correction_weights(same, same, mask, OffPolicyCorrectionConfig(**bounds))
    assert result is not None
    assert result.tolist() == [[1.0, 1.0]]

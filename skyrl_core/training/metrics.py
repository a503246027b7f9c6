"""The metrics of an update from those of its optimizer steps."""

from collections.abc import Sequence

from skyrl_core.training.step import StepOutcome


def summarise(outcomes: Sequence[StepOutcome], rates: Sequence[float], empty: int) -> dict[str, float]:
    """Metrics of an update that took `outcomes` optimizer steps at learning rates `rates`.

    Losses and gradient norm are means over optimizer steps; everything measured on tokens is the mean over all trained
    tokens of the update, so no cut into minibatches, microbatches or ranks changes it. `empty` counts minibatches
    without a trained token, on which no step was taken.
    """
    metrics = {
        "policy/optimizer_steps": float(len(outcomes)),
        "policy/empty_minibatches": float(empty),
        "policy/trained_tokens": float(sum(outcome.tokens for outcome in outcomes)),
    }
    if not outcomes:
        return metrics
    steps = len(outcomes)
    metrics["policy/loss"] = sum(outcome.loss for outcome in outcomes) / steps
    for name in outcomes[0].losses:
        metrics[f"policy/{name}"] = sum(outcome.losses[name] for outcome in outcomes) / steps
    metrics["policy/grad_norm"] = sum(outcome.grad_norm for outcome in outcomes) / steps
    metrics["policy/grad_norm_max"] = max(outcome.grad_norm for outcome in outcomes)
    metrics["policy/lr"] = rates[-1]
    for name in outcomes[0].token_sums:
        metrics[f"policy/{name}"] = (
            sum(outcome.token_sums[name] for outcome in outcomes) / metrics["policy/trained_tokens"]
        )
    metrics["policy/ratio_max"] = max(outcome.ratio_max for outcome in outcomes)
    metrics["policy/ratio_min"] = min(outcome.ratio_min for outcome in outcomes)
    return metrics

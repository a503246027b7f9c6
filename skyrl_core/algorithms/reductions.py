"""Loss reductions as per-token weights, so that micro-batch and rank cuts cannot change the loss."""

import torch
from torch import Tensor

from skyrl_core.config.algorithm_rules import REDUCTIONS
from skyrl_core.errors import ConfigurationError


def token_weights(
    loss_mask: Tensor,
    reduction: str,
    group_ids: Tensor,
    max_seq_len: int | None = None,
    micro_batch_size: int | None = None,
) -> Tensor:
    """Weights [B, T] float32 over a whole minibatch such that Σ token_loss · weights is the reduced loss.

    loss_mask [B, T] bool; group_ids [B]: rows of one prompt share a number. Take the weights of the global minibatch
    once and cut them with the rows: a sum over any cut is then exact. Masked tokens weigh 0. Rows, prompts and chunks
    without a trained token are not counted (SkyRL counts such rows), so adding padding rows changes nothing.

    - token_mean: 1 / N, N trained tokens of the minibatch (DAPO, arXiv:2503.14476).
    - sequence_mean: 1 / (S · n_i), S rows with trained tokens, n_i trained tokens of row i (GRPO, arXiv:2402.03300).
    - seq_mean_token_sum_norm: 1 / (S · max_seq_len) (Dr. GRPO, arXiv:2503.20783).
    - prompt_mean: 1 / (P · n_p), P prompts with trained tokens, n_p trained tokens of all samples of prompt p.
    - token_mean_legacy: 1 / (C · n_c): the mean over C chunks of `micro_batch_size` consecutive rows of the chunk's
      token mean. SkyRL takes the physical microbatches; ours are fixed by the minibatch's row order, however the
      rows are really cut, and equal SkyRL's when each rank's share divides by `micro_batch_size`.

    Raises ConfigurationError for an unknown reduction, or one whose constant is missing.
    """
    if reduction not in REDUCTIONS:
        raise ConfigurationError(
            f"trainer.algorithm.loss_reduction: unknown {reduction!r}; known: {', '.join(REDUCTIONS)}"
        )
    tokens = loss_mask.sum(dim=1, dtype=torch.float64)
    sequences = (tokens > 0).sum().double()
    if reduction == "token_mean":
        denominator = tokens.sum().expand_as(tokens)
    elif reduction == "sequence_mean":
        denominator = sequences * tokens
    elif reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None or max_seq_len <= 0:
            raise ConfigurationError(
                f"trainer.algorithm.max_seq_len must be a positive number of tokens for loss_reduction={reduction}, "
                f"got {max_seq_len}"
            )
        denominator = (sequences * max_seq_len).expand_as(tokens)
    elif reduction == "prompt_mean":
        denominator = _mean_of_means(tokens, torch.unique(group_ids, return_inverse=True)[1])
    else:
        if micro_batch_size is None or micro_batch_size <= 0:
            raise ConfigurationError(
                f"loss_reduction={reduction} needs trainer.micro_train_batch_size_per_gpu, got {micro_batch_size}"
            )
        rows = torch.arange(len(tokens), device=tokens.device)
        denominator = _mean_of_means(tokens, torch.div(rows, micro_batch_size, rounding_mode="floor"))
    weights = loss_mask / denominator.clamp(min=1.0)[:, None]
    return weights.float()


def _mean_of_means(tokens: Tensor, part: Tensor) -> Tensor:
    """[B]: parts with trained tokens × trained tokens of the row's part."""
    parts = int(part.max()) + 1 if len(part) else 0
    per_part = torch.zeros(parts, dtype=torch.float64, device=tokens.device).index_add_(0, part, tokens)
    return (per_part > 0).sum() * per_part[part]

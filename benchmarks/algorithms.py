"""Time of each loss, forward and backward, beside the log-probabilities that it is computed from.

    python benchmarks/algorithms.py [--rows 512] [--columns 2048] [--vocab 32] [--repeats 5] [--threads 1]

The yardstick is the plain way to a token's log-probability: log_softmax over `vocab` logits, gather, and its backward.
A real model has a vocabulary a thousand times larger, so its share is larger still. Only ratios mean anything: times
depend on the machine.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_core.algorithms.kl import token_kl
from skyrl_core.algorithms.losses import value_loss
from skyrl_core.algorithms.reductions import token_weights
from skyrl_core.algorithms.registry import get_policy_loss, get_prepare, list_policy_losses
from skyrl_core.algorithms.types import PolicyLossInputs
from skyrl_core.config.algorithm import AlgorithmConfig, OffPolicyCorrectionConfig


def make_inputs(rows: int, columns: int, seed: int = 0) -> PolicyLossInputs:
    """Ragged rows of sampled tokens: [rows, columns], three quarters of them trained on average."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator) * 3
    lengths = torch.randint(columns // 2, columns + 1, (rows, 1), generator=generator)
    return PolicyLossInputs(
        logprobs=(old + 0.1 * torch.randn(rows, columns, generator=generator)).requires_grad_(),
        old_logprobs=old,
        advantages=torch.randn(rows, 1, generator=generator).expand(rows, columns),
        loss_mask=torch.arange(columns) < lengths,
        rollout_logprobs=old + 0.05 * torch.randn(rows, columns, generator=generator),
    )


def with_selection(inputs: PolicyLossInputs, config: AlgorithmConfig) -> PolicyLossInputs:
    """The inputs with what the loss chooses over the minibatch, where it chooses."""
    prepare = get_prepare(config.policy_loss_type)
    return PolicyLossInputs(
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        loss_mask=inputs.loss_mask,
        rollout_logprobs=inputs.rollout_logprobs,
        selection=None if prepare is None else prepare(inputs, config, 0),
    )


def gather_logprobs(rows: int, columns: int, vocab: int) -> Callable[[], Tensor]:
    """The yardstick: sum of the log-probabilities of given tokens."""
    logits = torch.randn(rows, columns, vocab, requires_grad=True)
    tokens = torch.randint(vocab, (rows, columns, 1))
    return lambda: torch.log_softmax(logits, dim=-1).gather(-1, tokens).sum()


def candidates(inputs: PolicyLossInputs) -> dict[str, Callable[[], Tensor]]:
    """What is measured, by name: each returns a scalar to go backward from."""
    mask = inputs.loss_mask
    weights = token_weights(mask, "token_mean", torch.arange(len(mask)))

    def policy(config: AlgorithmConfig) -> Callable[[], Tensor]:
        loss = get_policy_loss(config.policy_loss_type)
        ready = with_selection(inputs, config)
        return lambda: (loss(ready, config).token_loss * weights).sum()

    def kl(estimator: str) -> Callable[[], Tensor]:
        return lambda: (token_kl(inputs.logprobs, inputs.old_logprobs, mask, estimator) * weights).sum()

    def value() -> Tensor:
        loss = value_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, 0.2)
        return (loss.token_loss * weights).sum()

    measured = {f"policy loss {name}": policy(AlgorithmConfig(policy_loss_type=name)) for name in list_policy_losses()}
    correction = OffPolicyCorrectionConfig(tis_ratio_type="token", sequence_mask_metric="geometric")
    measured["policy loss regular, corrected"] = policy(AlgorithmConfig(off_policy_correction=correction))
    measured |= {f"KL {estimator}": kl(estimator) for estimator in ("k2", "k3")}
    measured["value loss"] = value
    return measured


def seconds(forward: Callable[[], Tensor], repeats: int) -> float:
    """Median time of forward and backward, after one run that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        forward().backward()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Time losses beside a plain log-probability gather.")
    for name, default in (("rows", 512), ("columns", 2048), ("vocab", 32), ("repeats", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    base = seconds(gather_logprobs(args.rows, args.columns, args.vocab), args.repeats)
    print(
        f"[{args.rows}, {args.columns}] tokens, vocabulary {args.vocab}, {args.threads} thread(s), forward + backward"
    )
    print(f"{'':34}{'ms':>10}{'ratio':>10}")
    print(f"{'log_softmax and gather':34}{1000 * base:>10.1f}{1.0:>10.2f}")
    for name, forward in candidates(make_inputs(args.rows, args.columns)).items():
        taken = seconds(forward, args.repeats)
        print(f"{name:34}{1000 * taken:>10.1f}{taken / base:>10.2f}", flush=True)


if __name__ == "__main__":
    main()

"""K2's RL objective (report section 3.2.3, after Kimi k1.5, arXiv 2501.12599): pure functions of rewards and log-probabilities."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    values: Tensor  # (G, K) reward minus its group's mean
    live: Tensor  # (G,) groups whose rewards differ; the others give no signal and are dropped
    group_spread: float  # mean over groups of the rewards' standard deviation within one
    batch_spread: float  # standard deviation over all samples


def advantages(rewards_GK: Tensor) -> Advantages:
    """No division by the spread, no value network: r - mean of the group."""
    values = rewards_GK - rewards_GK.mean(1, keepdim=True)
    live = (rewards_GK.amax(1) - rewards_GK.amin(1)) > 1e-6
    return Advantages(values, live, rewards_GK.std(1, correction=0).mean().item(), rewards_GK.std(correction=0).item())


def policy_loss(advantage_S: Tensor, logprob_S: Tensor, old_logprob_S: Tensor, tau: float) -> Tensor:
    """Sum over samples of (A - tau log(pi / pi_old))^2 / (2 tau), with log-probabilities of whole answers in nats.

    The division by 2 tau makes the gradient at pi = pi_old that of -A log pi, so that PTX's weight does not depend on tau.
    """
    return ((advantage_S - tau * (logprob_S - old_logprob_S)) ** 2).sum() / (2 * tau)


def shaped_reward(reward: float, over_budget: bool, penalty: float) -> float:
    """Budget control: a sample cut at its token budget loses `penalty`."""
    return reward - penalty if over_budget else reward


def temperature(step: int, steps: int, first: float, last: float) -> float:
    """Linear decay over the training."""
    return last + (first - last) * max(0.0, 1 - step / max(1, steps - 1))


def answer_logprobs(token_logprob_N: Tensor, sample_N: Tensor, samples: int) -> Tensor:
    """(S,) sums of token log-probabilities by the sample each token belongs to."""
    return torch.zeros(samples, device=token_logprob_N.device).index_add(0, sample_N, token_logprob_N)

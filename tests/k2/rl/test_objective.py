import pytest
import torch

from k2.rl.objective import advantages, answer_logprobs, policy_loss, shaped_reward, temperature


def test_advantages_are_rewards_less_their_groups_mean():
    """No division by the spread: a group ten times as spread has advantages ten times as large."""
    found = advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.0, 0.0, 0.1], [1.0, 0.0, 0.0, 0.0]]))
    expected = torch.tensor([[0.5, -0.5, -0.5, 0.5], [0.05, -0.05, -0.05, 0.05], [0.75, -0.25, -0.25, -0.25]])
    torch.testing.assert_close(found.values, expected)
    assert found.live.tolist() == [True, True, True]


def test_groups_that_are_all_equal_are_dead():
    """Trap 13: whatever the common reward; spread within groups and over the batch are told apart."""
    found = advantages(torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.3, 0.3], [0.0, 0.01]]))
    assert found.live.tolist() == [False, False, False, True]
    assert not found.values[:3].any()
    between = advantages(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    assert (between.group_spread, between.batch_spread) == (0.0, pytest.approx(0.5))
    within = advantages(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert (within.group_spread, within.batch_spread) == (pytest.approx(0.5), pytest.approx(0.5))


def test_loss_by_hand():
    """tau = 0.5, A = (0.5, -0.5), log-ratios (0.2, -0.4): ((0.5 - 0.1)^2 + (-0.5 + 0.2)^2) / 1 = 0.16 + 0.09."""
    old = torch.tensor([-3.0, -5.0])
    loss = policy_loss(torch.tensor([0.5, -0.5]), old + torch.tensor([0.2, -0.4]), old, 0.5)
    assert loss.item() == pytest.approx(0.25)


@pytest.mark.parametrize("tau", [0.01, 0.5, 20.0])
def test_on_policy_the_gradient_is_the_policy_gradient(tau):
    """At pi = pi_old it is that of -A log pi, for any tau: the PTX term's weight need not follow tau."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64).requires_grad_()
    A, token = torch.randn(4, generator=generator, dtype=torch.float64), torch.tensor([0, 3, 6, 3])

    def logprob():
        return logits.log_softmax(-1).gather(1, token[:, None]).squeeze(1)

    found = torch.autograd.grad(policy_loss(A, logprob(), logprob().detach(), tau), logits)[0]
    torch.testing.assert_close(found, torch.autograd.grad(-(A * logprob()).sum(), logits)[0])


def test_tau_holds_the_policy_back():
    """The loss is least where log(pi / pi_old) is A / tau: a larger tau allows less change."""
    A, old = torch.tensor([0.6]), torch.tensor([-2.0])
    for tau in (0.1, 2.0):
        logprob = (old + A / tau).requires_grad_()
        policy_loss(A, logprob, old, tau).backward()
        assert logprob.grad is not None and logprob.grad.abs().item() < 1e-6


def test_over_budget_answers_lose_the_penalty():
    """And no others."""
    assert (
        shaped_reward(0.75, True, 0.5) == 0.25 and shaped_reward(0.75, False, 0.5) == 0.75 and shaped_reward(0.0, True, 0.5) == -0.5
    )


def test_temperature_is_linear_from_first_to_last_step():
    """1.0 to 0.6 in five steps; a run of one step takes the first."""
    assert [temperature(i, 5, 1.0, 0.6) for i in range(5)] == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    assert temperature(0, 1, 1.0, 0.6) == 1.0


def test_log_probabilities_are_summed_by_answer():
    """Tokens of one answer need not lie together; an answer without tokens has log-probability 0."""
    found = answer_logprobs(torch.tensor([-1.0, -2.0, -4.0, -8.0]), torch.tensor([2, 0, 2, 0]), 3)
    assert found.tolist() == [-10.0, 0.0, -5.0]

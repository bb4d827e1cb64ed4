import copy

import pytest
import torch
import torch.nn.functional as F

from k2.errors import K2Error
from k2.serve.engine import FIRST_SLOTS, Engine, sample

NO_STOP = (999,)


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def greedy(model, prompt, steps):
    """The likeliest continuation by full forward passes, with its log-probabilities."""
    ids, logprobs = list(prompt), []
    for _ in range(steps):
        log_p = F.log_softmax(model(torch.tensor([ids]))[0, -1], dim=-1)
        ids.append(int(log_p.argmax()))
        logprobs.append(log_p.max().item())
    return ids[len(prompt) :], logprobs


@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_greedy_is_the_forward_pass(q_lora_rank, make_model):
    """A batch of prompts of any length, some equal, gives what forward passes give one by one: log-probabilities to 1e-4."""
    model = make_model(q_lora_rank=q_lora_rank)
    prompts = prompts_of([5, 1, 40, 17])
    prompts.insert(2, prompts[0])
    steps = FIRST_SLOTS + 10  # the cache has to grow
    for prompt, completion in zip(prompts, Engine(model, NO_STOP).generate(prompts, steps, temperature=0.0, seed=0)):
        ids, logprobs = greedy(model, prompt, steps)
        assert completion.ids == ids and not completion.finished
        torch.testing.assert_close(completion.logprobs, logprobs, atol=1e-4, rtol=0)


def test_stop_tokens_and_budgets(make_model):
    """A row ends with its first stop token, which it contains, or after its own budget (0: nothing); the others go on."""
    model = make_model()
    prompts = prompts_of([9, 12, 3, 7, 30, 8])
    free = Engine(model, NO_STOP).generate(prompts, 20, temperature=0.0, seed=0)
    stop = free[0].ids[4]
    budgets = [20, 3, 0, 20, 1, 20]
    found = Engine(model, [stop]).generate(prompts, budgets, temperature=0.0, seed=0)
    for completion, whole, budget in zip(found, free, budgets):
        expected = whole.ids[:budget]
        finished = stop in expected
        expected = expected[: expected.index(stop) + 1] if finished else expected
        assert completion.ids == expected and completion.finished == finished
        assert len(completion.logprobs) == len(completion.ids)
    assert found[0].finished and found[0].ids[-1] == stop and len(found[0].ids) <= 5


def test_a_row_does_not_depend_on_its_neighbours(make_model):
    """Row i samples the same tokens whatever the other rows are; equal prompts sample different answers."""
    engine = Engine(make_model(), NO_STOP)
    a, b = prompts_of([10, 25])
    group = engine.generate([a] * 6, 12, temperature=1.0, seed=5)
    assert len({tuple(c.ids) for c in group}) == 6
    assert [c.ids for c in engine.generate([a] * 6, 12, temperature=1.0, seed=5)] == [c.ids for c in group]
    mixed = engine.generate([a, b, a, b, b, a], [12, 3, 12, 1, 20, 12], temperature=1.0, seed=5)
    assert [mixed[i].ids for i in (0, 2, 5)] == [group[i].ids for i in (0, 2, 5)]
    assert [c.ids for c in engine.generate([a] * 6, 12, temperature=1.0, seed=6)] != [c.ids for c in group]


def test_logprobs_are_the_policys_own(make_model):
    """Whatever temperature and top-p shaped the sample, its log-probabilities are those of a forward pass at temperature 1."""
    model = make_model()
    prompts = prompts_of([6, 30])
    for prompt, completion in zip(prompts, Engine(model, NO_STOP).generate(prompts, 10, temperature=1.7, seed=1, top_p=0.9)):
        ids = torch.tensor([prompt + completion.ids])
        with torch.no_grad():
            log_p = F.log_softmax(model(ids[:, :-1])[0, len(prompt) - 1 :], dim=-1)
        expected = log_p.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_samples_follow_the_distribution(temperature, top_p):
    """200,000 draws have the frequencies of softmax(logits / temperature), cut to the fewest tokens with mass top-p."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(0))
    p = (logits / temperature).softmax(-1)
    order = p.argsort(descending=True)
    kept = order[: int((p[order].cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros(40).index_copy(0, kept, p[kept] / p[kept].sum())
    draws = torch.rand(200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    token, logprob = sample(logits.expand(200_000, 40), temperature, top_p, draws)
    found = torch.bincount(token, minlength=40) / 200_000
    assert (found[expected == 0] == 0).all()
    assert (found - expected).abs().max() < 5 * (0.25 / 200_000) ** 0.5
    torch.testing.assert_close(logprob[:100], logits.log_softmax(-1)[token[:100]])


def test_extreme_draws_stay_within_the_support():
    """The least and the greatest draw give tokens of positive probability, even when the ends of the vocabulary have none."""
    logits = torch.full((2, 6), -torch.inf)
    logits[:, 2:4] = 0.0
    token, _ = sample(logits, 1.0, 1.0, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert all(t in (2, 3) for t in token.tolist())


def test_update_replaces_all_weights_or_none(make_model):
    """After an update the engine answers as the new model does; a wrong shape or a missing tensor changes nothing."""
    old, new, prompts = make_model(), make_model(seed=1), prompts_of([8, 4])
    engine = Engine(copy.deepcopy(old), NO_STOP, version=3)
    before = engine.generate(prompts, 8, temperature=0.0, seed=0)
    bad = dict(new.state_dict()) | {"lm_head.weight": torch.zeros(5, 5)}
    with pytest.raises(K2Error, match=r"lm_head.weight is \[5, 5\], not \[128, 64\]"):
        engine.update(bad.items(), version=4)
    del bad["lm_head.weight"]
    with pytest.raises(K2Error, match="lm_head.weight is missing"):
        engine.update(bad.items(), version=4)
    assert engine.version == 3 and engine.generate(prompts, 8, temperature=0.0, seed=0) == before
    engine.update(new.state_dict().items(), version=4)
    assert engine.version == 4
    assert engine.generate(prompts, 8, temperature=0.0, seed=0) == Engine(new, NO_STOP).generate(
        prompts, 8, temperature=0.0, seed=0
    )
    assert engine.generate(prompts, 8, temperature=0.0, seed=0) != before


@pytest.mark.parametrize(
    ("prompts", "message"), [([[1], []], "prompt 1 is empty"), ([[1, 128]], "outside of the vocabulary"), ([[-1]], "outside")]
)
def test_bad_prompts_are_named(prompts, message, make_model):
    """An empty prompt and a token outside of the vocabulary are refused before anything runs."""
    with pytest.raises(ValueError, match=message):
        Engine(make_model(), NO_STOP).generate(prompts, 4, temperature=0.0, seed=0)

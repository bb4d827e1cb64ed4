"""The rollout engine: batched generation on a cache of MLA latents.

Prompts are prefilled in the naive form, packed end to end, each distinct one once (RL samples K answers to a prompt). Decoding runs
in the absorbed form, one token a row and step, each row at its own position; rows that are done leave when they are half of the
batch.
Legend: B rows in flight, S slots of the cache, V = vocab_size.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from k2.errors import K2Error
from k2.model.attention import Packing
from k2.model.mla import Latents
from k2.model.transformer import Transformer

PREFILL_TOKENS = 8192  # at once; bounds the memory of a prefill
FIRST_SLOTS = 32  # room for new tokens at first; doubled when it is full


@dataclass
class Completion:
    """What was sampled for one prompt."""

    ids: list[int] = field(default_factory=list)  # with the stop token, if it was reached
    logprobs: list[float] = field(
        default_factory=list
    )  # nats, of each sampled token, under the policy itself: temperature 1, no top-p
    finished: bool = False  # ended by a stop token, not by its budget


class Engine:
    """Generates with a model that it owns. `version` says which weights it has; `update` replaces them in place."""

    def __init__(self, model: Transformer, stop_ids: Iterable[int], version: int = 0) -> None:
        self.model, self.stop_ids, self.version = model, frozenset(stop_ids), version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        temperature: float,
        seed: int,
        top_p: float = 1.0,
    ) -> list[Completion]:
        """One completion a prompt, in order. `max_new_tokens` is one budget for all or one each; temperature 0 is greedy.

        Row i draws from a random stream of its own, seeded by (seed, i), so what it samples does not depend on the other rows, up
        to the rounding of batched products. Log-probabilities are the policy's own, log pi(token) as in K2's objective, whatever
        the temperature.
        """
        budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        self._check(prompts, budgets, temperature, top_p)
        done = [Completion() for _ in prompts]
        row = [i for i, budget in enumerate(budgets) if budget > 0]  # completions in flight, by row of the batch
        if not row:
            return done
        draws = (
            np.stack([np.random.default_rng([seed, i]).random(max(budgets)) for i in range(len(prompts))]) if temperature else None
        )
        logits_BV, cache, at_B = self._prefill([prompts[i] for i in row], max(budgets))
        alive = [True] * len(row)
        step = 0
        while True:
            draw_B = None if draws is None else torch.from_numpy(draws[row, step]).to(logits_BV.device)
            token_B, logprob_B = sample(logits_BV, temperature, top_p, draw_B)
            for r, (token, logprob) in enumerate(zip(token_B.tolist(), logprob_B.tolist(), strict=True)):
                if alive[r]:
                    completion = done[row[r]]
                    completion.ids.append(token)
                    completion.logprobs.append(logprob)
                    completion.finished = token in self.stop_ids
                    alive[r] = not completion.finished and len(completion.ids) < budgets[row[r]]
            if not any(alive):
                return done
            if sum(alive) * 2 <= len(row):
                kept = torch.tensor([r for r, a in enumerate(alive) if a], device=at_B.device)
                cache = [latents.select(kept) for latents in cache]
                token_B, at_B = token_B[kept], at_B[kept]
                row, alive = [i for i, a in zip(row, alive, strict=True) if a], [True] * len(kept)
            logits_BV = self._decode(token_B, at_B, cache, alive)
            at_B = at_B + torch.tensor(alive, device=at_B.device)  # a row that is done writes its last slot again and again
            step += 1

    @torch.no_grad()
    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by name: Transformer's state dict, with the routers' selection biases. On K2Error none is changed."""
        new = dict(named_tensors)
        self.check_weights(new)
        for name, t in self.model.state_dict().items():
            t.copy_(new[name])
        self.version = version

    def check_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """K2Error unless `update` can take them: each tensor of the model there, in its shape, and no other."""
        state = self.model.state_dict()
        wrong = [f"{n} is missing" for n in state if n not in tensors] + [f"{n} is unknown" for n in tensors if n not in state]
        shapes = [(n, list(t.shape), list(state[n].shape)) for n, t in tensors.items() if n in state]
        wrong += [f"{n} is {found}, not {expected}" for n, found, expected in shapes if found != expected]
        if wrong:
            raise K2Error(f"these weights are not of the engine's model: {'; '.join(wrong[:20])}")

    def _prefill(self, prompts: list[Sequence[int]], budget: int) -> tuple[Tensor, list[Latents], Tensor]:
        """Logits (B, V) of the first new token, the filled cache, and the position of the next token (B,)."""
        model, device = self.model, self.model.lm_head.weight.device
        distinct = sorted({tuple(p) for p in prompts}, key=len)  # of like length together: attention pads to the longest
        slots = len(distinct[-1]) + min(budget, FIRST_SLOTS)
        cache = [Latents(model.config, len(distinct), slots, model.lm_head.weight.dtype, device) for _ in model.attentions()]
        last = []
        for start, stop in _chunks([len(p) for p in distinct]):
            packing = Packing.of([len(p) for p in distinct[start:stop]], device)
            tokens = torch.tensor([t for p in distinct[start:stop] for t in p], device=device)
            flat = [Latents(model.config, 1, len(tokens), model.lm_head.weight.dtype, device) for _ in cache]
            hidden = model.hidden(tokens[None], packing, flat)[0]
            ends = (packing.positions == 0).nonzero().squeeze(1)[1:] - 1
            last.append(hidden[torch.cat([ends, torch.tensor([len(tokens) - 1], device=device)])])
            which = start + (packing.positions == 0).cumsum(0) - 1  # the row of each token
            for latents, packed in zip(cache, flat, strict=True):
                latents.latent[which, packing.positions] = packed.latent[0]
                latents.k_rope[which, packing.positions] = packed.k_rope[0]
        index = {p: i for i, p in enumerate(distinct)}
        rows = torch.tensor([index[tuple(p)] for p in prompts], device=device)
        logits = model.lm_head(torch.cat(last))[rows]
        return logits, [latents.select(rows) for latents in cache], torch.tensor([len(p) for p in prompts], device=device)

    def _decode(self, token_B: Tensor, at_B: Tensor, cache: list[Latents], alive: list[bool]) -> Tensor:
        used = int(at_B.max()) + 1
        if used > cache[0].latent.shape[1]:
            for latents in cache:
                latents.grow(used + max(FIRST_SLOTS, used // 2))
        visible_BS = torch.arange(used, device=at_B.device) <= at_B[:, None]
        return self.model.decode(token_B, at_B, cache, visible_BS)

    def _check(self, prompts: Sequence[Sequence[int]], budgets: list[int], temperature: float, top_p: float) -> None:
        V = self.model.config.vocab_size
        if len(budgets) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(budgets)} values of max_new_tokens")
        if temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"temperature {temperature} must be at least 0 and top_p {top_p} in (0, 1]")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {i} is empty; begin it with a token")
            if not 0 <= min(prompt) <= max(prompt) < V:
                raise ValueError(f"prompt {i} has a token outside of the vocabulary of {V}")


def sample(logits_BV: Tensor, temperature: float, top_p: float, draw_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token (B,), where the distribution's cumulative sum passes draw_B in [0, 1) (None: the likeliest), and its log-probability at
    temperature 1 (B,)."""
    logits_BV = logits_BV.float()
    if draw_B is None:
        token_B = logits_BV.argmax(-1)
    else:
        p_BV = (logits_BV / temperature).softmax(-1)
        if top_p < 1:
            sorted_BV, order_BV = p_BV.sort(-1, descending=True)
            beyond = sorted_BV.cumsum(-1) - sorted_BV >= top_p
            p_BV = p_BV.scatter(1, order_BV, sorted_BV.masked_fill(beyond, 0))
        total_BV = p_BV.cumsum(-1)
        token_B = torch.searchsorted(total_BV, (1 - draw_B[:, None]).float() * total_BV[:, -1:]).squeeze(
            1
        )  # never one of probability 0
    return token_B, logits_BV.gather(1, token_B[:, None]).squeeze(1) - logits_BV.logsumexp(-1)


def _chunks(lengths: list[int]) -> Iterable[tuple[int, int]]:
    """Consecutive ranges of prompts with at most PREFILL_TOKENS tokens, or one prompt that is longer."""
    start, total = 0, 0
    for i, length in enumerate(lengths):
        if i > start and total + length > PREFILL_TOKENS:
            yield start, i
            start, total = i, 0
        total += length
    yield start, len(lengths)

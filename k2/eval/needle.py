"""A needle in a haystack: a fact at some depth of a long context, asked for at its end."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from k2.data.recall import needle_document

if TYPE_CHECKING:
    from k2.model.transformer import Transformer
    from k2.tokenizer.chat import ChatTokenizer

# Makes (prompt tokens, answer tokens) of `length` tokens together, from the length, the depth (0 begin, 1 end) and a seed.
Haystack = Callable[[int, float, int], tuple[list[int], list[int]]]


@dataclasses.dataclass(frozen=True)
class NeedleResult:
    """One cell of the map: `accuracy` is the share of needles whose whole answer is the greedy one, `nll` nats per answer token."""

    length: int
    depth: float
    accuracy: float
    nll: float
    trials: int


def needle_map(
    model: Any,
    haystack: Haystack,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    batch_tokens: int = 4096,
) -> Iterator[NeedleResult]:
    """Retrieval for each length and depth, one result at a time. The same seed makes the same needles for every model."""
    for length in lengths:
        for depth in depths:
            needles = [haystack(length, depth, seed + trial) for trial in range(trials)]
            batch = max(1, batch_tokens // length)
            scores = [score for i in range(0, trials, batch) for score in retrieve(model, needles[i : i + batch])]
            exact, nll = zip(*scores)
            yield NeedleResult(length, depth, sum(exact) / trials, sum(nll) / trials, trials)


@torch.inference_mode()
def retrieve(model: Any, needles: Sequence[tuple[list[int], list[int]]]) -> list[tuple[bool, float]]:
    """For each (prompt, answer): whether greedy decoding gives the answer, and the mean nats of an answer token given those before.

    One forward pass with the answer in place tells both: greedy decoding gives it iff each of its tokens is the most likely one.
    `model` needs `hidden(tokens_BT) -> (B, T, C)` and `lm_head`, so that only the answers' logits are made.
    """
    longest = max(len(prompt) + len(answer) for prompt, answer in needles)
    tokens = torch.zeros(len(needles), longest, dtype=torch.long)  # (B, T), padded behind, which a causal model does not see
    for row, (prompt, answer) in zip(tokens, needles):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    weight = getattr(model.lm_head, "weight", None)
    hidden = model.hidden(tokens if weight is None else tokens.to(weight.device))  # (B, T, C)
    scores = []
    for state, (prompt, answer) in zip(hidden, needles):
        places = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)  # each predicts the next token
        logits = model.lm_head(state[places]).float()  # (A, V)
        target = torch.tensor(answer, device=logits.device)
        scores.append((bool((logits.argmax(-1) == target).all()), F.cross_entropy(logits, target).item()))
    return scores


def without_yarn(model: "Transformer") -> "Transformer":
    """The same weights with the rotary positions of pre-training: what YaRN adds is the difference between the two."""
    from k2.model.transformer import Transformer

    plain = Transformer(dataclasses.replace(model.config, yarn=None)).to(model.lm_head.weight.dtype)
    plain.load_state_dict(model.state_dict(), assign=True)  # shares the tensors
    return plain.eval()


def haystack(tokenizer: "ChatTokenizer", text: Sequence[int]) -> Haystack:
    """Needles in a stretch of `text` (tokens nobody trained on), in the form of the training documents (k2/data/recall.py)."""

    def make(length: int, depth: float, seed: int) -> tuple[list[int], list[int]]:
        rng = random.Random(seed)
        start = rng.randrange(max(1, len(text) - length))
        ids, begin, _ = needle_document(rng, tokenizer.encode, length, depth, text[start : start + length])
        return ids[:begin], ids[begin:]

    return make

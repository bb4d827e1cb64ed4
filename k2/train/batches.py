"""What a training step sees, as a pure function of the step: so that resuming needs no state but the step's number.

Legend: B sequences, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from k2.data.shards import TokenRows
from k2.errors import K2Error
from k2.model.attention import Packing


@dataclass(frozen=True)
class Batch:
    """One forward and backward. weights: 1 where a target counts, 0 where not. With `packing` B is 1."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64
    weights: Tensor  # (B, T) float32
    packing: Packing | None = None


class Batches(Protocol):
    def step(self, index: int) -> list[Batch]:
        """The micro-batches of a step."""
        ...


class RowBatches:
    """Pre-training: packed rows in a new random order each epoch."""

    def __init__(self, rows: TokenRows, seq_len: int, batch_tokens: int, micro_batch_tokens: int, seed: int) -> None:
        if rows.row_tokens != seq_len + 1:
            raise K2Error(
                f"the token rows are {rows.row_tokens - 1} long, the stage's seq_len is {seq_len}; run the tokenize stage again"
            )
        self.rows, self.seed = rows, seed
        self.batch, self.micro = batch_tokens // seq_len, micro_batch_tokens // seq_len
        if rows.rows < self.batch:
            raise K2Error(
                f"{rows.rows} token rows do not fill one batch of {self.batch}; give a larger corpus or a smaller batch_tokens"
            )

    def step(self, index: int) -> list[Batch]:
        wanted = np.arange(index * self.batch, (index + 1) * self.batch)
        epochs, offsets = np.divmod(wanted, self.rows.rows)
        order = {e: np.random.default_rng([self.seed, e]).permutation(self.rows.rows) for e in np.unique(epochs)}
        chosen = np.array([order[e][i] for e, i in zip(epochs, offsets, strict=True)])
        parts = self.rows.read(chosen).split(self.micro)
        return [Batch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), torch.ones(t.shape[0], t.shape[1] - 1)) for t in parts]


class DialogueBatches:
    """Fine-tuning: whole dialogues packed end to end, each seen alone by attention; loss where the mask says."""

    def __init__(
        self, dialogues: Sequence[tuple[list[int], list[bool]]], seq_len: int, batch_tokens: int, micro_batch_tokens: int, seed: int
    ) -> None:
        kept = [(ids[: seq_len + 1], mask[: seq_len + 1]) for ids, mask in dialogues if any(mask[1 : seq_len + 1])]
        if not kept:
            raise K2Error(f"no dialogue has an assistant's words within {seq_len} tokens; raise seq_len or look at the chat data")
        self.dialogues, self.seed, self.micro = kept, seed, micro_batch_tokens
        self.batch_tokens = batch_tokens
        mean = sum(len(ids) for ids, _ in kept) / len(kept)
        self.batch = max(1, round(batch_tokens / mean))  # dialogues of a step, so that a step has batch_tokens on average

    def step(self, index: int) -> list[Batch]:
        wanted = range(index * self.batch, (index + 1) * self.batch)
        count = len(self.dialogues)
        order = {e: np.random.default_rng([self.seed, e]).permutation(count) for e in {i // count for i in wanted}}
        return pack([self.dialogues[order[i // count][i % count]] for i in wanted], self.micro)


def pack(dialogues: Sequence[tuple[list[int], list[bool]]], micro_batch_tokens: int) -> list[Batch]:
    """Dialogues (tokens, mask of trained tokens) to packed batches of at most micro_batch_tokens, none split."""
    groups: list[list[tuple[list[int], list[bool]]]] = [[]]
    for dialogue in dialogues:
        if groups[-1] and sum(len(ids) - 1 for ids, _ in groups[-1]) + len(dialogue[0]) - 1 > micro_batch_tokens:
            groups.append([])
        groups[-1].append(dialogue)
    return [_packed(group) for group in groups]


def _packed(group: list[tuple[list[int], list[bool]]]) -> Batch:
    inputs = torch.tensor([t for ids, _ in group for t in ids[:-1]])
    targets = torch.tensor([t for ids, _ in group for t in ids[1:]])
    weights = torch.tensor([float(m) for _, mask in group for m in mask[1:]])
    return Batch(inputs[None], targets[None], weights[None], Packing.of([len(ids) - 1 for ids, _ in group]))

"""The one training loop: pretrain, anneal, extend and sft are this with other batches, lengths and schedules."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from k2.config import OptimConfig
from k2.data.shards import TokenRows
from k2.model.transformer import Transformer
from k2.optim.schedule import wsd
from k2.progress import bar
from k2.train.batches import Batches
from k2.train.loss import token_nll
from k2.train.state import load_state, save_state
from k2.train.trainer import Trainer

Rows = list[dict[str, float]]  # one row of statistics a step


@dataclass
class Run:
    """What a loop needs to know of the place where it runs."""

    name: str  # on the progress bar
    resume_folder: Path  # of exactly this computation
    checkpoint_seconds: float
    log: Callable[[int, dict[str, float]], None] = lambda step, values: None


def train(
    trainer: Trainer,
    batches: Batches,
    tokens: int,
    batch_tokens: int,
    optim: OptimConfig,
    run: Run,
    validate: Callable[[], float],
    every: int,
) -> Rows:
    """Train for `tokens`, in steps of about `batch_tokens`, and return a row of statistics for each step.

    Resumes from the newest whole state in run.resume_folder. `validate` gives bits per byte, every `every` tokens and at the end.
    """
    steps = max(1, round(tokens / batch_tokens))
    first, seen, history = _resume(trainer, run)
    saved = time.monotonic()
    validate_every = max(1, round(every / batch_tokens))
    with bar(run.name, steps * batch_tokens, "tok", initial=first * batch_tokens) as progress:
        for step in range(first, steps):
            start = time.perf_counter()
            micro_batches = batches.step(step)
            lr = wsd(min((step + 1) * batch_tokens, steps * batch_tokens), steps * batch_tokens, optim)
            row = trainer.language_model_step(micro_batches, lr)
            count = sum(b.inputs.numel() for b in micro_batches)
            seen += count
            row |= {"optim/lr": lr, "data/tokens": float(seen), "perf/tokens_per_second": count / (time.perf_counter() - start)}
            if (step + 1) % validate_every == 0 or step + 1 == steps:
                row["validation/bits_per_byte"] = validate()
            history.append({"step": float(step + 1), **row})
            run.log(step + 1, row)
            progress.set_postfix_str(
                f"loss {row['train/loss']:.3f} max_logit {row.get('attn/max_logit', math.nan):.1f}", refresh=False
            )
            progress.update(batch_tokens)
            if time.monotonic() - saved > run.checkpoint_seconds and step + 1 < steps:
                save_state(run.resume_folder, step + 1, trainer.state(), {"tokens": seen, "history": history})
                saved = time.monotonic()
    return history


def _resume(trainer: Trainer, run: Run) -> tuple[int, int, Rows]:
    """(steps done, tokens seen, rows so far)."""
    state = load_state(run.resume_folder)
    if state is None:
        return 0, 0, []
    step, tensors, extra = state
    trainer.load_state(tensors)
    print(f"{run.name}: resuming after step {step} ({extra['tokens']:,} tokens)")
    for row in extra["history"]:  # an interrupted tracker may have lost its last batch: the same step and value again does no harm
        run.log(int(row["step"]), {k: v for k, v in row.items() if k != "step"})
    return step, extra["tokens"], extra["history"]


@torch.no_grad()
def bits_per_byte(model: Transformer, rows: TokenRows, tokens: int, device: str = "cpu", micro_batch: int = 16) -> float:
    """Total negative log-likelihood in bits over the UTF-8 bytes of the targets, on the first `tokens` of the validation rows."""
    count = min(rows.rows, max(1, tokens // (rows.row_tokens - 1)))
    nats = 0.0
    for start in range(0, count, micro_batch):
        t = rows.read(np.arange(start, min(start + micro_batch, count))).to(device)
        hidden = model.hidden(t[:, :-1])
        nats += token_nll(hidden.flatten(0, 1), model.lm_head.weight, t[:, 1:].flatten()).sum().item()
    return nats / math.log(2) / int(rows.bytes(np.arange(count)).sum())

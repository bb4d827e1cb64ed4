"""What the training stages share: threads and device, the loop, the curves as CSV, the model as a folder."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from k2.config import ExecutionConfig, TrainConfig
from k2.data.shards import TokenRows
from k2.model import hf
from k2.model.transformer import Transformer
from k2.train.batches import Batches
from k2.train.loop import Rows, Run, bits_per_byte, train
from k2.train.trainer import Trainer
from tasks.stage import Stage


def set_up(execution: ExecutionConfig) -> str:
    """Apply execution.threads and return the device."""
    if execution.threads:
        torch.set_num_threads(execution.threads)
    if execution.device != "auto":
        return execution.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_of(stage: Stage) -> Run:
    return Run(stage.name, stage.resume_folder, stage.execution.checkpoint_seconds, stage.tracker.log)


def train_stage(stage: Stage, model: Transformer, tokenizer: Path, batches: Batches, config: TrainConfig) -> None:
    """Train `model`, write models/<stage>, metrics/<stage>.json and plots/<stage>.csv."""
    device = set_up(stage.execution)
    trainer = Trainer(model, stage.params.muonclip, config.dtype, config.bias_update_rate, device)
    validation = TokenRows(stage.dep("tokens"), "validation")
    rows = train(
        trainer,
        batches,
        config.tokens,
        config.batch_tokens,
        config.optim,
        run_of(stage),
        validate=lambda: bits_per_byte(model, validation, config.validation_tokens, device),
        every=config.validation_every,
    )
    hf.save(model, model.config, stage.out(stage.name), tokenizer, trainer.optimizer.master)
    stage.write(f"{stage.name}.csv", to_csv(rows))
    stage.metrics(summary(rows) | {"muon_parameters": sum(trainer.optimizer.master[n].numel() for n in trainer.optimizer.muon)})


def summary(rows: Rows) -> dict[str, float]:
    """The metrics of a training stage; the first is its headline."""
    last = rows[-1]
    tail = rows[-min(10, len(rows)) :]
    return {
        "bits_per_byte": last["validation/bits_per_byte"],
        "train_loss": statistics.mean(row["train/loss"] for row in tail),
        "tokens": last["data/tokens"],
        "steps": len(rows),
        "tokens_per_second": statistics.median(row["perf/tokens_per_second"] for row in rows),
        "max_logit": max(row["attn/max_logit"] for row in rows),
        "clipped_heads": sum(row["attn/clipped_heads"] for row in rows),
        "max_violation": statistics.mean(row["moe/max_violation"] for row in tail),
    }


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV, floats to seven digits; a value that a row lacks is an empty cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: f"{v:.7g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return out.getvalue()

"""Reinforcement learning with verifiable rewards: roll out, update, push the weights to the rollout engine (report section 3.2)."""

import copy
from pathlib import Path
from typing import Any

from k2.data import records
from k2.model import hf
from k2.rl.loop import RL
from k2.serve.engine import Engine
from k2.sync.checkpoint_engine import CheckpointEngine
from k2.sync.receiver import Receiver
from k2.sync.transport import LocalTransport
from k2.tokenizer.chat import ChatTokenizer
from k2.train.batches import DialogueBatches
from k2.train.loop import Rows
from k2.train.trainer import DTYPES, Trainer
from tasks.stage import Stage, run
from tasks.training import run_of, set_up, to_csv


def build(sft: Path, trajectories: Path, params: Any, device: str) -> tuple[RL, DialogueBatches]:
    """The loop around the model of `sft`, and the batches of its PTX term. `params` has muonclip, gym and rl."""
    config = params.rl
    model, _ = hf.load(sft)
    tokenizer = ChatTokenizer.load(sft)
    engine = Engine(copy.deepcopy(model).cast(DTYPES[config.dtype]).to(device), tokenizer.stop_ids)
    trainer = Trainer(model, params.muonclip, config.dtype, config.bias_update_rate, device)
    checkpoints, transport = CheckpointEngine(), LocalTransport(Receiver(engine))

    def push(version: int) -> None:
        checkpoints.push(model.state_dict().items(), [transport], version)

    chats = records.read(trajectories / "train.jsonl")
    dialogues = [tokenizer.encode_chat(chat["messages"], chat.get("tools")) for chat in chats]
    ptx = DialogueBatches(dialogues, config.ptx_batch_tokens, config.ptx_batch_tokens, config.ptx_batch_tokens, config.seed)
    return RL(trainer, engine, tokenizer, params.gym, config, push), ptx


def main(stage: Stage) -> None:
    loop, ptx = build(stage.dep("sft"), stage.dep("trajectories"), stage.params, set_up(stage.execution))
    prompts = list(records.read(stage.dep("rl_prompts") / "prompts.jsonl"))
    rows = loop.train(prompts, ptx, run_of(stage))

    model = loop.trainer.model
    hf.save(model, model.config, stage.out("rl"), stage.dep("sft"), loop.trainer.optimizer.master)
    stage.write("rl.csv", to_csv(rows))
    stage.metrics(summary(rows))


def summary(rows: Rows) -> dict[str, float]:
    """Held-out mean reward in percent, before and after, of all domains and each; the first is the headline."""
    before, after = rows[0], next(row for row in reversed(rows) if "rl/held_out" in row)
    values = {"held_out_rise": after["rl/held_out"] - before["rl/held_out"]}
    for when, row in (("after", after), ("before", before)):
        values |= {key.replace("rl/held_out", f"held_out_{when}"): row[key] for key in row if key.startswith("rl/held_out")}
    steps = rows[1:]  # none, when every answer was right from the start
    return values | {
        "logprob_gap": max((row["rl/logprob_gap"] for row in steps), default=0.0),
        "dead_groups": sum(row["rl/dead_groups"] for row in steps),
        "sync_seconds": sum(row["rl/sync_seconds"] for row in steps) / max(1, len(steps)),
    }


if __name__ == "__main__":
    run("rl", main)

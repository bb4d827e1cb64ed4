"""Reinforcement learning with verifiable rewards: roll out, update, push the weights to the rollout engine (report section 3.2)."""

import copy
import json
import time

from k2.model import hf
from k2.rl.loop import RL
from k2.serve.engine import Engine
from k2.sync.checkpoint_engine import CheckpointEngine
from k2.sync.receiver import Receiver
from k2.sync.transport import LocalTransport
from k2.tokenizer.chat import ChatTokenizer
from k2.train.batches import DialogueBatches
from k2.train.trainer import DTYPES, Trainer
from tasks.stage import Stage, run
from tasks.training import run_of, set_up, to_csv


def main(stage: Stage) -> None:
    config, gym, device = stage.params.rl, stage.params.gym, set_up(stage.execution)
    folder = stage.dep("sft")
    model, _ = hf.load(folder)
    tokenizer = ChatTokenizer.load(folder)
    rollout_model = copy.deepcopy(model).cast(DTYPES[config.dtype]).to(device)
    trainer = Trainer(model, stage.params.muonclip, config.dtype, config.bias_update_rate, device)
    engine = Engine(rollout_model, [tokenizer.im_end_id, tokenizer.eos_id])
    checkpoints, transport = CheckpointEngine(), LocalTransport(Receiver(engine))
    sync_seconds: list[float] = []

    def push(version: int) -> None:
        start = time.perf_counter()
        checkpoints.push(model.state_dict().items(), [transport], version)
        sync_seconds.append(time.perf_counter() - start)

    prompts = [json.loads(line) for line in (stage.dep("rl_prompts") / "prompts.jsonl").read_text().splitlines()]
    lines = (stage.dep("trajectories") / "train.jsonl").read_text().splitlines()
    dialogues = [tokenizer.encode_chat(record["messages"], record.get("tools")) for record in map(json.loads, lines)]
    ptx = DialogueBatches(dialogues, config.ptx_batch_tokens, config.ptx_batch_tokens, config.ptx_batch_tokens, config.seed)
    rows = RL(trainer, engine, tokenizer, gym, config, push).train(prompts, ptx, run_of(stage))

    hf.save(model, model.config, stage.out("rl"), folder, trainer.optimizer.master)
    stage.write("rl.csv", to_csv(rows))
    before, after = rows[0], next(row for row in reversed(rows) if "rl/held_out" in row)
    held_out = {f"held_out_{when}{key[11:]}": row[key] for when, row in (("after", after), ("before", before)) for key in row if key.startswith("rl/held_out")}
    stage.metrics(
        {"held_out_rise": after["rl/held_out"] - before["rl/held_out"]}
        | held_out
        | {
            "logprob_gap": max(row["rl/logprob_gap"] for row in rows[1:]),
            "dead_groups": sum(row["rl/dead_groups"] for row in rows[1:]),
            "sync_seconds": sum(sync_seconds) / len(sync_seconds),
        }
    )


if __name__ == "__main__":
    run("rl", main)

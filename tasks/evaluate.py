"""Stage evaluate: every model on what it should be good at, as metrics, plots and samples."""

import dataclasses
from statistics import mean
from typing import Any

import numpy as np
import torch

from k2 import model as models
from k2.data import records
from k2.data.shards import TokenRows
from k2.eval import gym, latency, needle, samples
from k2.progress import track
from k2.serve.engine import Engine
from k2.tokenizer.chat import ChatTokenizer
from k2.train.loop import bits_per_byte
from tasks.stage import Stage, run
from tasks.training import set_up, to_csv

STAGES = ["pretrain", "anneal", "extend", "sft", "rl"]
TALKERS = ["sft", "rl"]  # have learnt the dialogue format


@dataclasses.dataclass
class Findings:
    """What is found out about one model."""

    metrics: dict[str, Any]
    load: list[list[int]]  # tokens of each routed expert, MoE layer by layer, on the validation text
    said: list[dict[str, Any]]
    needle: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    gym: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def main(stage: Stage) -> None:
    found = {name: evaluate(stage, name) for name in track(STAGES, "evaluate", unit="model")}
    out = stage.out("evaluation")
    samples_ = [{"stage": name, **sample} for name, f in found.items() for sample in f.said]
    loads = [{"stage": name, "load": f.load} for name, f in found.items()]
    records.write(out / "samples.jsonl", samples_)
    records.write(out / "expert_load.jsonl", loads)
    bits = [{"stage": name, "bits_per_byte": f.metrics["bits_per_byte"]} for name, f in found.items()]
    stage.write("bits_per_byte.csv", to_csv(bits))
    before = [{"accuracy_before": row["accuracy"], "nll_before": row["nll"]} for row in found["anneal"].needle]
    stage.write("needle.csv", to_csv([row | past for row, past in zip(found["extend"].needle, before, strict=True)]))
    stage.write(
        "gym.csv",
        to_csv([{"stage": name, "task": f"{row['domain']} ({name})", **row} for name in TALKERS for row in found[name].gym]),
    )
    stage.metrics({"rl_pass_at_1": found["rl"].metrics["pass_at_1"], **{name: f.metrics for name, f in found.items()}})


def evaluate(stage: Stage, name: str) -> Findings:
    """Everything about the model of one stage."""
    config, gym_config, device = stage.params.evaluate, stage.params.gym, set_up(stage.execution)
    folder = stage.dep(f"models/{name}")
    model, model_config = models.load(folder, dtype=torch.bfloat16, device=device)
    tokenizer = ChatTokenizer.load(folder)
    engine = Engine(model, tokenizer.stop_ids)
    model.collect(True)
    validation = TokenRows(stage.dep("tokens"), "validation")
    bits = bits_per_byte(model, validation, config.bits_per_byte_tokens, device)
    load = [router.load.tolist() for router in model.routers() if router.load is not None]
    model.collect(False)
    found = Findings({"bits_per_byte": bits}, load, samples.continuations(engine, tokenizer, 40, config.temperature, config.seed))
    if name in ("anneal", "extend"):  # before and after context extension
        found.needle = find_needles(model, tokenizer, validation, config)
        found.metrics |= {f"needle_{key}": mean(row[key] for row in found.needle) for key in list(found.needle[0])[2:]}
    if name in TALKERS:
        chats = list(records.read(stage.dep("trajectories") / "validation.jsonl"))[: config.prompts_per_domain]
        context = round(model_config.max_position_embeddings * (model_config.yarn.factor if model_config.yarn else 1))
        found.gym, played = talk(engine, tokenizer, gym_config, config, chats, context)
        found.metrics |= played
        found.said += samples.dialogues(engine, tokenizer, gym_config, config.temperature, config.seed)
    if name == "rl":
        prompt, _ = tokenizer.encode_chat([{"role": "user", "content": "7 + 2 = ?"}], add_generation_prompt=True)
        found.metrics["latency"] = latency.latency(engine, prompt, new_tokens=16, requests=12, batch=16, seed=config.seed)
    return found


def find_needles(model: Any, tokenizer: ChatTokenizer, validation: TokenRows, config: Any) -> list[dict[str, Any]]:
    """The needle map as a row a cell and, for a model with YaRN, the same weights without it."""
    text = validation.read(np.arange(min(validation.rows, 64)))[:, :-1].flatten().tolist()
    args = (needle.haystack(tokenizer, text), config.needle_lengths, config.needle_depths, config.needle_trials, config.seed)
    table = [{"length": c.length, "depth": c.depth, "accuracy": c.accuracy, "nll": c.nll} for c in needle.needle_map(model, *args)]
    if model.config.yarn:
        for row, cell in zip(table, needle.needle_map(needle.without_yarn(model), *args), strict=True):
            row |= {"accuracy_no_yarn": cell.accuracy, "nll_no_yarn": cell.nll}
    return table


def talk(
    engine: Engine, tokenizer: ChatTokenizer, gym_config: Any, config: Any, trajectories: list, max_context: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Gym results as a row a domain, and as metrics: their means, each, and the accuracy of tool calls."""
    results = gym.held_out(
        engine, tokenizer, gym_config, config.prompts_per_domain, config.samples_per_prompt, config.temperature, config.seed
    )
    table = [{"domain": domain, **dataclasses.asdict(result)} for domain, result in results.items()]
    metrics: dict[str, Any] = {key: sum(row[key] for row in table) / len(table) for key in ("pass_at_1", "pass_at_k", "reward")}
    metrics["gym"] = {domain: dataclasses.asdict(result) for domain, result in results.items()}
    calls = gym.tool_call_accuracy(engine, tokenizer, trajectories, 96, max_context, config.seed)
    return table, metrics | ({"tool_calls": dataclasses.asdict(calls)} if calls else {})


if __name__ == "__main__":
    run("evaluate", main)

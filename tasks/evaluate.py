"""Stage evaluate: every model on what it should be good at, as metrics, plots and samples."""

import csv
import dataclasses
import io
import json
from typing import Any

import torch
from k2.serve.engine import Engine

from k2 import model as models
from k2.data.shards import TokenRows
from k2.eval import gym, latency, needle, samples
from k2.progress import bar
from k2.tokenizer.chat import ChatTokenizer
from k2.train.loop import bits_per_byte
from tasks.stage import Stage, run
from tasks.training import set_up

STAGES = ["pretrain", "anneal", "extend", "sft", "rl"]
TALKERS = ["sft", "rl"]  # have learnt the dialogue format


def main(stage: Stage) -> None:
    config, device = stage.params.evaluate, set_up(stage.execution)
    validation = TokenRows(stage.dep("tokens"), "validation")
    trajectories = [json.loads(line) for line in (stage.dep("trajectories") / "validation.jsonl").read_text().splitlines()]
    metrics: dict[str, Any] = {"rl_pass_at_1": None}
    rows: dict[str, list[dict[str, Any]]] = {"bits_per_byte.csv": [], "needle.csv": [], "gym.csv": []}
    said: list[dict[str, Any]] = []
    with bar("evaluate", len(STAGES), "model") as progress:
        for name in STAGES:
            folder = stage.dep(f"models/{name}")
            model, model_config = models.load(folder, dtype=torch.bfloat16, device=device)
            tokenizer = ChatTokenizer.load(folder)
            engine = Engine(model, stop_ids=[tokenizer.im_end_id, tokenizer.eos_id])
            bits = bits_per_byte(model, validation, config.bits_per_byte_tokens, device)
            metrics[name] = {"bits_per_byte": bits}
            rows["bits_per_byte.csv"].append({"stage": name, "bits_per_byte": bits})
            said += [{"stage": name, **s} for s in samples.continuations(engine, tokenizer, 40, config.temperature, config.seed)]
            if name == "extend":
                rows["needle.csv"], found = find_needles(model, tokenizer, config)
                metrics[name] |= found
            if name in TALKERS:
                played, table = talk(
                    engine, tokenizer, stage.params.gym, config, trajectories, model_config.max_position_embeddings
                )
                metrics[name] |= played
                rows["gym.csv"] += [{"stage": name, "task": f"{row['domain']} ({name})", **row} for row in table]
                said += [
                    {"stage": name, **s}
                    for s in samples.dialogues(engine, tokenizer, stage.params.gym, config.temperature, config.seed)
                ]
            if name == "rl":
                prompt = tokenizer.encode_chat([{"role": "user", "content": "7 + 2 = ?"}], add_generation_prompt=True)[0]
                metrics["latency"] = latency.latency(engine, prompt, new_tokens=16, requests=12, batch=16, seed=config.seed)
            progress.update(1)
    metrics["rl_pass_at_1"] = metrics["rl"]["pass_at_1"]
    (stage.out("evaluation") / "samples.jsonl").write_text("".join(json.dumps(s, ensure_ascii=False) + "\n" for s in said))
    for file, table in rows.items():
        stage.write(file, to_csv(table))
    stage.metrics(metrics)


def find_needles(model: Any, tokenizer: ChatTokenizer, config: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The needle map with YaRN and, for the same weights, without."""
    args = (needle.haystack(tokenizer), config.needle_lengths, config.needle_depths, config.needle_trials, config.seed)
    table = []
    for with_, without in zip(needle.needle_map(model, *args), needle.needle_map(needle.without_yarn(model), *args)):
        row = {"length": with_.length, "depth": with_.depth, "accuracy_yarn": with_.accuracy, "nll_yarn": with_.nll}
        table.append(row | {"accuracy_no_yarn": without.accuracy, "nll_no_yarn": without.nll})
    means = {f"needle_{key}": sum(row[key] for row in table) / len(table) for key in list(table[0])[2:]}
    return table, means


def talk(
    engine: Engine, tokenizer: ChatTokenizer, gym_config: Any, config: Any, trajectories: list, max_context: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Gym results by domain and their mean, and tool-call accuracy."""
    results = gym.held_out(
        engine, tokenizer, gym_config, config.prompts_per_domain, config.samples_per_prompt, config.temperature, config.seed
    )
    table = [{"domain": domain, **dataclasses.asdict(result)} for domain, result in results.items()]
    metrics: dict[str, Any] = {key: sum(row[key] for row in table) / len(table) for key in ("pass_at_1", "pass_at_k", "reward")}
    metrics["gym"] = {domain: dataclasses.asdict(result) for domain, result in results.items()}
    calls = gym.tool_call_accuracy(engine, tokenizer, trajectories[: config.prompts_per_domain], 96, max_context, config.seed)
    return metrics | ({"tool_calls": dataclasses.asdict(calls)} if calls else {}), table


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as CSV with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    return text.getvalue()


if __name__ == "__main__":
    run("evaluate", main)

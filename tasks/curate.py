"""Choose RL prompts by the SFT model's pass rate."""

from collections import Counter

from k2.data import records
from k2.model import hf
from k2.rl.curate import curate
from k2.serve.engine import Engine
from k2.tokenizer.chat import ChatTokenizer
from tasks.stage import Stage, run
from tasks.training import set_up


def main(stage: Stage) -> None:
    device = set_up(stage.execution)
    tokenizer = ChatTokenizer.load(stage.dep("sft"))
    model, _ = hf.load(stage.dep("sft"), device=device)
    kept, dropped = curate(Engine(model, tokenizer.stop_ids), tokenizer, stage.params.gym, stage.params.curate)
    folder = stage.out("rl_prompts")
    for name, tasks in (("prompts", kept), ("dropped", dropped)):
        records.write(folder / f"{name}.jsonl", tasks)
    count = Counter(task["domain"] for task in kept)
    rates = [task["pass_rate"] for task in kept + dropped]
    stage.metrics(
        {"kept": len(kept), "dropped": len(dropped), "mean_pass_rate": sum(rates) / len(rates)}
        | {f"kept_{domain}": count[domain] for domain in stage.params.gym.domains}
    )


if __name__ == "__main__":
    run("curate", main)

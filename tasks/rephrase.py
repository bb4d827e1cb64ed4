"""Stage rephrase: rewrite the best documents in several styles and keep what stays faithful."""

import time

from k2 import llm, rephrase
from k2.data import records
from k2.llm.embedding import SentenceEmbedder
from tasks.stage import Stage, run


def main(stage: Stage) -> None:
    config, settings = stage.params.rephrase, stage.params.llm
    documents = list(records.read(stage.dep("documents") / "train.jsonl"))
    rephrase.plan(documents, config)  # a wrong style is told before a model is loaded
    if stage.execution.threads:
        import torch

        torch.set_num_threads(stage.execution.threads)
    model = llm.open_model(settings, stage.execution.device)
    start = time.perf_counter()
    kept, rejected = rephrase.rephrase(
        documents, config, model, SentenceEmbedder().similarity, settings.temperature, settings.top_p
    )
    seconds = time.perf_counter() - start
    folder = stage.out("rewrites")
    records.write(folder / "rewrites.jsonl", kept)
    records.write(folder / "rejected.jsonl", rejected)
    speed = {"generated_tokens": model.tokens, "tokens_per_second": round(model.tokens / seconds, 1), "seconds": round(seconds, 1)}
    stage.metrics({**rephrase.summary(kept, rejected), **speed})


if __name__ == "__main__":
    run("rephrase", main)

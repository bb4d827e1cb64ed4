"""Stage tokenize: documents and rewrites to packed token rows, mixed by domain for each phase."""

from k2.data import mixture, packing, records, shards
from k2.errors import ConfigError
from k2.tokenizer import ChatTokenizer
from tasks.stage import Stage, run

PHASES = ("pretrain", "anneal", "extend")


def main(stage: Stage) -> None:
    config, pretrain = stage.params.tokenize, stage.params.pretrain
    if set(config.phases) != set(PHASES):
        raise ConfigError(f"params.yaml: tokenize.phases: must name {', '.join(PHASES)}, not {', '.join(config.phases)}")
    tokenizer = ChatTokenizer.load(stage.dep("tokenizer"))
    documents, rewrites = stage.dep("documents"), stage.dep("rewrites")
    validation = list(records.read(documents / "validation.jsonl"))
    held_out = {record["id"] for record in validation}
    train = list(records.read(documents / "train.jsonl"))
    train += [r | {"domain": "rewrites"} for r in records.read(rewrites / "rewrites.jsonl") if r["rewrite_of"] not in held_out]
    domains = packing.encode(tokenizer, train, "train")
    out, metrics = stage.out("tokens"), {}
    for phase in PHASES:
        section = getattr(stage.params, phase)
        rows, metrics[phase] = mixture.build(phase, section, config, domains, tokenizer, long=section.seq_len > pretrain.seq_len)
        shards.write_rows(out, phase, rows)
    rows = packing.validation_rows(packing.encode(tokenizer, validation, "validation"), pretrain.seq_len, config.seed)
    byte_counts = tokenizer.token_bytes()[rows[:, 1:]].sum(axis=1)
    shards.write_rows(out, "validation", rows, byte_counts)
    metrics["validation"] = {"rows": len(rows), "bytes": int(byte_counts.sum())}
    stage.metrics(metrics)


if __name__ == "__main__":
    run("tokenize", main)

"""Stage tokenizer: train a byte-level BPE on the documents, or take an existing one."""

from pathlib import Path

from k2.data import records
from k2.tokenizer import ChatTokenizer, bpe
from tasks.stage import Stage, run

SAMPLE_CHARACTERS = 4_000_000  # merges settle long before; the time grows with it


def main(stage: Stage) -> None:
    config, model = stage.params.tokenizer, stage.params.model
    documents = stage.dep("documents")
    if config.path is None:
        texts = [record["text"] for record in records.read(documents / "train.jsonl")]
        tokenizer = bpe.train(bpe.sample(texts, SAMPLE_CHARACTERS), model.vocab_size)
    else:
        tokenizer = bpe.adopt(Path(config.path), model.vocab_size)
    folder = stage.out("tokenizer")
    bpe.save(tokenizer, folder)
    held_out = [record["text"] for record in records.read(documents / "validation.jsonl")]
    tokens = sum(map(len, ChatTokenizer.load(folder).encode_batch(held_out)))
    size = sum(len(text.encode()) for text in held_out)
    stage.metrics({"vocab_size": bpe.vocabulary_size(tokenizer), "validation_bytes_per_token": round(size / tokens, 3)})


if __name__ == "__main__":
    run("tokenizer", main)

"""Stage corpus: read the source, clean it, hold out a validation split."""

from k2.data import clean, records, sources
from tasks.stage import Stage, run


def main(stage: Stage) -> None:
    config = stage.params.corpus
    corpus = clean.build(sources.read(config.source), config)
    folder = stage.out("documents")
    records.write(folder / "train.jsonl", corpus.train)
    records.write(folder / "validation.jsonl", corpus.validation)
    stage.metrics(corpus.metrics())


if __name__ == "__main__":
    run("corpus", main)

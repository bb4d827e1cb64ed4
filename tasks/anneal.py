"""Annealing: the same loop on the annealing mixture while the learning rate falls to its floor (report section 2.5)."""

from k2.data.shards import TokenRows
from k2.model import hf
from k2.train.batches import RowBatches
from tasks.stage import Stage, run
from tasks.training import train_stage


def main(stage: Stage) -> None:
    config = stage.params.anneal
    model, _ = hf.load(stage.dep("pretrain"))
    rows = TokenRows(stage.dep("tokens"), "anneal")
    batches = RowBatches(rows, config.seq_len, config.batch_tokens, config.micro_batch_tokens, config.seed)
    train_stage(stage, model, stage.dep("pretrain"), batches, config)


if __name__ == "__main__":
    run("anneal", main)

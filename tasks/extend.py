"""Context extension: long sequences with YaRN's frequencies and temperature (report section 2.5)."""

import dataclasses

from k2.data.shards import TokenRows
from k2.model import hf
from k2.model.transformer import Transformer
from k2.train.batches import RowBatches
from tasks.stage import Stage, run
from tasks.training import train_stage


def main(stage: Stage) -> None:
    config = stage.params.extend
    short, short_config = hf.load(stage.dep("anneal"))
    model = Transformer(dataclasses.replace(short_config, yarn=config.yarn))
    model.load_state_dict(short.state_dict())
    rows = TokenRows(stage.dep("tokens"), "extend")
    batches = RowBatches(rows, config.seq_len, config.batch_tokens, config.micro_batch_tokens, config.seed)
    train_stage(stage, model, stage.dep("anneal"), batches, config)


if __name__ == "__main__":
    run("extend", main)

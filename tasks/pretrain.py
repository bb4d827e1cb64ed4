"""Pre-training at the short context: MuonClip, warmup-stable-decay (report section 2.5)."""

from k2.data.shards import TokenRows
from k2.model.transformer import Transformer
from k2.train.batches import RowBatches
from tasks.stage import Stage, run
from tasks.training import train_stage


def main(stage: Stage) -> None:
    config = stage.params.pretrain
    model = Transformer(stage.params.model).initialize(config.seed)
    rows = TokenRows(stage.dep("tokens"), "pretrain")
    batches = RowBatches(rows, config.seq_len, config.batch_tokens, config.micro_batch_tokens, config.seed)
    train_stage(stage, model, stage.dep("tokenizer"), batches, config)


if __name__ == "__main__":
    run("pretrain", main)

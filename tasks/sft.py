"""Fine-tuning with Muon on judged trajectories and worked gym tasks, loss on the assistant's tokens (report section 3.1)."""

from k2.data import records
from k2.gym import make_all
from k2.model import hf
from k2.tokenizer.chat import ChatTokenizer
from k2.train.batches import DialogueBatches
from tasks.stage import Stage, run
from tasks.training import train_stage


def main(stage: Stage) -> None:
    config = stage.params.sft
    model, _ = hf.load(stage.dep("extend"))
    tokenizer = ChatTokenizer.load(stage.dep("extend"))
    chats = records.read(stage.dep("trajectories") / "train.jsonl")
    dialogues = [(chat["messages"], chat.get("tools")) for chat in chats]
    for domain in make_all(stage.params.gym).values():
        tasks = [domain.task(i) for i in range(config.gym_examples_per_domain)]
        dialogues += [(domain.solution(task), domain.env(task).tools) for task in tasks]
    encoded = [tokenizer.encode_chat(messages, tools) for messages, tools in dialogues]
    batches = DialogueBatches(encoded, config.seq_len, config.batch_tokens, config.micro_batch_tokens, config.seed)
    train_stage(stage, model, stage.dep("extend"), batches, config)


if __name__ == "__main__":
    run("sft", main)

"""A bandit around the small model: an answer is one token, and some tokens are right. All but the domain is the real thing."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from k2.config import GymConfig, OptimConfig, load_params
from k2.gym.env import Domain, Env, Step
from k2.model.transformer import Transformer
from k2.rl.loop import RL
from k2.serve.engine import Engine
from k2.sync.checkpoint_engine import CheckpointEngine
from k2.sync.receiver import Receiver
from k2.sync.transport import LocalTransport
from k2.tokenizer import ChatTokenizer, bpe
from k2.train.batches import DialogueBatches
from k2.train.trainer import DTYPES, Trainer

VOCAB = 300
PARAMS = load_params(Path(__file__).parents[3] / "params.yaml")


class Bandit(Domain):
    """Reward 1 when `right` says so of the answer's text."""

    def __init__(self, right: Callable[[str], bool]) -> None:
        super().__init__("bandit", 1000)
        self.right = right

    def draw(self, seed: int, attempt: int) -> dict:
        return {"prompt": f"say {seed % 7} {seed} {attempt}"}

    def env(self, task: dict) -> Env:
        return BanditEnv(self.right, task["prompt"])

    def solution(self, task: dict) -> list[dict]:
        return [{"role": "user", "content": task["prompt"]}, {"role": "assistant", "content": "a"}]


class BanditEnv(Env):
    def __init__(self, right: Callable[[str], bool], prompt: str) -> None:
        self.right, self.messages = right, [{"role": "user", "content": prompt}]

    def react(self, message: dict) -> Step:
        return Step(reward=float(self.right(message["content"])), done=True)


@pytest.fixture(scope="session")
def chat() -> ChatTokenizer:
    return ChatTokenizer(bpe.train(["say one and say two, all at once"] * 3, VOCAB))


@pytest.fixture
def make_rl(make_model: Callable[..., Transformer], chat: ChatTokenizer) -> Callable[..., tuple[RL, DialogueBatches]]:
    """`make_rl(right, dtype=, ptx_weight=, **changes of params.yaml's rl)`: the loop of tasks/rl.py around the bandit."""

    def make(right: Callable[[str], bool], seed: int = 0, lr: float = 1e-2, **changes) -> tuple[RL, DialogueBatches]:
        defaults = {
            "steps": 4, "prompts_per_step": 4, "samples_per_prompt": 8, "held_out_prompts": 8, "held_out_every": 2,
            "optim": OptimConfig(lr=lr, final_lr=lr, warmup_tokens=0, decay_fraction=1.0),
            "final_temperature": 1.0, "ptx_weight": 0.0, "dtype": "float32",
        }  # fmt: skip
        config = dataclasses.replace(PARAMS.rl, **defaults | changes)
        model = make_model(seed, vocab_size=VOCAB)
        engine = Engine(copy.deepcopy(model).cast(DTYPES[config.dtype]), range(VOCAB))  # any token ends an answer
        trainer = Trainer(model, PARAMS.muonclip, config.dtype, config.bias_update_rate)
        sender, transport = CheckpointEngine(), LocalTransport(Receiver(engine))
        gym = GymConfig(domains={}, max_new_tokens={"bandit": 1}, held_out_seed=1000)
        loop = RL(trainer, engine, chat, gym, config, lambda v: sender.push(model.state_dict().items(), [transport], v))
        loop.domains["bandit"] = Bandit(right)
        ptx = DialogueBatches([chat.encode_chat(Bandit(right).solution({"prompt": "say it"}))], 64, 64, 64, seed=0)
        return loop, ptx

    return make


@pytest.fixture
def prompts() -> list[dict]:
    return [Bandit(bool).task(i) for i in range(12)]

"""A small model of the real architecture: every part of K2's at a size where a test takes milliseconds."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k2.config import ModelConfig, YarnConfig, load_params
from k2.model.transformer import Transformer

ROOT = Path(__file__).parents[2]
YARN = YarnConfig(factor=4.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
TINY = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96, "num_attention_heads": 4,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    """A small ModelConfig, with changes."""
    base = dataclasses.replace(load_params(ROOT / "params.yaml").model, **TINY)
    return lambda **changes: dataclasses.replace(base, **changes)


@pytest.fixture(scope="session")
def make_model(make_config: Callable[..., ModelConfig]) -> Callable[..., Transformer]:
    """A small random float32 model, with changes of its config; selection biases are random too."""

    def make(seed: int = 0, **changes) -> Transformer:
        model = Transformer(make_config(**changes)).initialize(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for router in model.routers():
            router.e_score_correction_bias.normal_(0, 0.1, generator=generator)
        return model

    return make


@pytest.fixture
def tokens() -> Callable[..., torch.Tensor]:
    """Random tokens (B, T) of the small vocabulary."""
    return lambda B, T, seed=0: torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from k2.config import MuonClipConfig, load_params
from k2.model.transformer import Transformer
from k2.train.trainer import Trainer


@pytest.fixture(scope="session")
def muonclip() -> MuonClipConfig:
    """The optimizer as params.yaml has it."""
    return load_params(Path(__file__).parents[3] / "params.yaml").muonclip


@pytest.fixture
def make_trainer(make_model: Callable[..., Transformer], muonclip: MuonClipConfig) -> Callable[..., Trainer]:
    """`make_trainer(seed=, dtype=, bias_update_rate=, **changes of muonclip)` around the small model."""

    def make(seed: int = 0, dtype: str = "float32", bias_update_rate: float = 0.0, **changes) -> Trainer:
        return Trainer(make_model(seed), dataclasses.replace(muonclip, **changes), dtype, bias_update_rate)

    return make

from pathlib import Path

import pytest
import torch

from k2.config import LLMConfig
from k2.errors import ConfigError, K2Error
from k2.llm import local, open_model


def ask(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_the_unpacked_weights_are_the_packages(smollm2: local.LocalModel) -> None:
    """The embedding that generates is the GGUF's, dequantised by the gguf package, in bfloat16."""
    from gguf import GGUFReader, dequantize

    tensor = next(t for t in GGUFReader(str(local.packaged_gguf())).tensors if t.name == "token_embd.weight")
    reference = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).bfloat16()
    assert torch.equal(smollm2._model.get_input_embeddings().weight.cpu(), reference)


def test_padding_does_not_change_answers(smollm2: local.LocalModel) -> None:
    """Greedy in float32, prompts of different length: answers alone and in one left-padded batch are equal, and make sense."""
    chats = ask("Say hello.", "What is the capital of France? Answer in one short sentence.", "Count from 1 to 5.")
    smollm2._model.float()
    try:
        together = smollm2.generate(chats, 10, 0, 1, 0)
        alone = [smollm2.generate([chat], 10, 0, 1, 0)[0] for chat in chats]
    finally:
        smollm2._model.bfloat16()
    assert together == alone
    assert "Paris" in together[1]


def test_sampling_is_decided_by_the_seed(smollm2: local.LocalModel) -> None:
    """The same seed gives the same answers whatever the global generator's state; another seed gives others."""
    chats, heard = ask("Tell a story about a cat.", "Describe the sea."), []
    before = smollm2.tokens
    first = smollm2.generate(chats, 12, 1.0, 1.0, seed=1, progress=heard.append)
    assert sum(heard) == 2 and 2 <= smollm2.tokens - before <= 24
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert smollm2.generate(chats, 12, 1.0, 1.0, seed=1) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert smollm2.generate(chats, 12, 1.0, 1.0, seed=2) != first
    assert smollm2.generate([], 12, 1.0, 1.0, seed=2) == []


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="llm.model: no/such/model is neither"):
        open_model(LLMConfig("local", "no/such/model", None, 1, 0.5, 0.9))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(K2Error, match="not a model that transformers can open"):
        open_model(LLMConfig("local", str(tmp_path), None, 1, 0.5, 0.9))

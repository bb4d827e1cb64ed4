"""The vocabulary and the dialogue format: byte-level BPE (`bpe`), K2's chat template (`chat`)."""

from k2.tokenizer.chat import ChatTokenizer

__all__ = ["ChatTokenizer"]

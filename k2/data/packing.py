"""Documents as tokens, and rows cut from them: [BOS] document [EOS] [BOS] document [EOS] ..., without padding.

Rows of a domain overlap by one token (a row's last target is the next row's first input), so that every token is a target once.
"""

import random
from collections.abc import Iterable, Sequence

import numpy as np

from k2.data import recall
from k2.data.shards import dtype_for
from k2.progress import track
from k2.tokenizer import ChatTokenizer

ENCODE_TOGETHER = 128  # documents of a call, which the tokenizer spreads over the cores


class Documents:
    """The tokenised documents of one domain: one flat array and where each document begins."""

    def __init__(self, documents: Sequence[np.ndarray]) -> None:
        self.lengths = np.array([len(d) for d in documents], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.flat = np.concatenate(documents) if documents else np.zeros(0, dtype=np.uint16)

    @property
    def tokens(self) -> int:
        return len(self.flat)

    def longest(self, least: int, tokens: int) -> "Documents":
        """The documents of at least `least` tokens; while these are fewer than `tokens` in all, the next longest too."""
        order = np.argsort(-self.lengths, kind="stable")
        enough = int(np.searchsorted(np.cumsum(self.lengths[order]), tokens)) + 1
        count = max(int((self.lengths >= least).sum()), min(enough, len(order)))
        return Documents([self[i] for i in sorted(order[:count])])

    def stream(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`count` tokens: the documents in random order, then again in another, as often as it takes."""
        pieces, have = [], 0
        while have < count:
            for i in rng.permutation(len(self.lengths)):
                pieces.append(self[i])
                have += len(pieces[-1])
                if have >= count:
                    break
        return np.concatenate(pieces)[:count]

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.offsets[i] : self.offsets[i + 1]]


def encode(tokenizer: ChatTokenizer, records: Iterable[dict], description: str) -> dict[str, Documents]:
    """Tokenise records by domain, in parallel."""
    records = list(records)
    batches = [records[i : i + ENCODE_TOGETHER] for i in range(0, len(records), ENCODE_TOGETHER)]
    dtype = dtype_for(tokenizer.vocab_size)
    domains: dict[str, list[np.ndarray]] = {}
    for batch in track(batches, description, unit="batch"):
        for record, ids in zip(batch, tokenizer.encode_batch([record["text"] for record in batch])):
            document = np.array([tokenizer.bos_id, *ids, tokenizer.eos_id], dtype=dtype)
            domains.setdefault(record["domain"], []).append(document)
    return {domain: Documents(documents) for domain, documents in sorted(domains.items())}


def cut_rows(stream: np.ndarray, seq_len: int) -> np.ndarray:
    """A stream of n * seq_len + 1 tokens as rows (n, seq_len + 1) that overlap by one token; a rest is left out."""
    return np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len].copy()


def recall_rows(tokenizer: ChatTokenizer, filler: Documents | None, rows: int, seq_len: int, seed: int) -> np.ndarray:
    """Rows of one recall document each, (rows, seq_len + 1): the facts and their questions always lie in one row.

    Every other row hides its facts in text of the corpus, the rest in noise sentences, which are easier.
    """
    rng = random.Random(seed)
    cache: dict[str, list[int]] = {}

    def encode_piece(text: str) -> list[int]:
        if text not in cache:
            cache[text] = tokenizer.encode(text)
        return cache[text]

    result = np.empty((rows, seq_len + 1), dtype=dtype_for(tokenizer.vocab_size))
    for i in range(rows):
        text = None
        if filler is not None and filler.tokens and i % 2 == 0:
            begin = rng.randrange(max(1, filler.tokens - seq_len))
            text = filler.flat[begin : begin + seq_len + 1].tolist()
        result[i] = recall.recall_document(rng, encode_piece, seq_len + 1, text)
    return result


def validation_rows(domains: dict[str, Documents], seq_len: int, seed: int) -> np.ndarray:
    """The held-out documents of all domains, once, shuffled: (rows, seq_len + 1). A tiny split is repeated to fill one row."""
    documents = Documents([domain[i] for domain in domains.values() for i in range(len(domain.lengths))])
    if documents.tokens < seq_len + 1:
        print(f"validation holds {documents.tokens} tokens; they are repeated to fill one row of {seq_len}")
    return cut_rows(documents.stream(max(documents.tokens, seq_len + 1), np.random.default_rng(seed)), seq_len)

"""From raw documents to a corpus: normalise, filter by rules, drop exact and near duplicates, hold out a validation split.

The report says that processing follows K1.5's (arXiv 2501.12599, appendix B): rule filters, then near-duplicate removal. Its
learned quality classifiers are not public. The rules here, each a reason under which dropped documents are counted:

    short           fewer than corpus.min_characters
    symbols         more than 40 % of the visible characters are neither letters nor digits
    repeated_lines  more than half of the characters lie in lines that came before
    unbroken        over 1,000 ASCII characters without a blank: encoded or minified data
"""

import hashlib
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from k2.config import CorpusConfig
from k2.data.sources import Document
from k2.errors import K2Error
from k2.progress import bar

MAX_SYMBOLS, MAX_REPEATED, MAX_UNBROKEN = 0.4, 0.5, 1000
SHINGLE_WORDS, PERMUTATIONS = 5, 64
UNBROKEN = re.compile(rf"[!-~]{{{MAX_UNBROKEN + 1}}}")
_CJK = "\u3040-\u30ff\u3400-\u9fff"  # written without blanks: each character counts as a word
WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")


@dataclass
class Corpus:
    train: list[dict[str, Any]] = field(default_factory=list)
    validation: list[dict[str, Any]] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)  # documents by reason
    read: int = 0  # documents

    def metrics(self) -> dict[str, Any]:
        """Documents and UTF-8 bytes by split and domain, and dropped documents by reason."""
        result: dict[str, Any] = {"documents_read": self.read, "dropped": dict(sorted(self.dropped.items()))}
        for name, records in (("train", self.train), ("validation", self.validation)):
            documents, sizes = Counter(), Counter()
            for record in records:
                documents[record["domain"]] += 1
                sizes[record["domain"]] += len(record["text"].encode())
            result[name] = {domain: {"documents": documents[domain], "bytes": sizes[domain]} for domain in sorted(documents)}
        return result


def build(documents: Iterable[Document], config: CorpusConfig) -> Corpus:
    """The corpus of `documents`, in their order. K2Error when fewer than two documents survive."""
    corpus, kept, size = Corpus(), [], 0
    seen: set[str] = set()
    near = NearDuplicates(config.near_duplicate_threshold)
    with bar("corpus", config.max_bytes, "B") as progress:
        for document in documents:
            corpus.read += 1
            text = normalise(document.text)
            read = len(text.encode())
            size += read
            progress.update(read)
            key = identity(text)
            reason = reject(text, config.min_characters)
            if reason is None and key in seen:
                reason = "exact_duplicate"
            if reason is None and near.seen(key, text):
                reason = "near_duplicate"
            if reason is None:
                seen.add(key)
                record = {
                    "id": key,
                    "text": text,
                    "domain": document.domain,
                    "license": document.license,
                    "source": document.source,
                }
                kept.append((record, document.group or key))
            else:
                corpus.dropped[reason] += 1
            if size >= config.max_bytes:
                break
        progress.total = size
    held_out = hold_out([group for _, group in kept], config.validation_fraction, config.seed)
    if not held_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(corpus.dropped.items())) or "none"
        raise K2Error(
            f"{config.source}: {len(kept)} of {corpus.read} documents are usable (dropped: {reasons}), but training and validation "
            "need at least one each; add text or lower corpus.min_characters"
        )
    for record, group in kept:
        (corpus.validation if group in held_out else corpus.train).append(record)
    return corpus


def identity(text: str) -> str:
    """A document's id: the first 16 hex digits of the SHA-256 of its text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def normalise(text: str) -> str:
    """NFC, newlines as \\n, no blanks at line ends, no zero bytes or lone surrogates, no blank lines around."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = re.sub("[\ud800-\udfff]", "\ufffd", text.replace("\0", ""))
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip("\n")


def reject(text: str, min_characters: int) -> str | None:
    """The first rule that a document breaks, None for a good one."""
    if len(text) < max(1, min_characters):
        return "short"
    visible = len(re.sub(r"\s", "", text))
    if visible - len(re.sub(r"[\W_]", "", text)) > MAX_SYMBOLS * visible:
        return "symbols"
    lines = [line.strip() for line in text.split("\n")]
    total = sum(map(len, lines))
    if total - sum(map(len, set(lines))) > MAX_REPEATED * total:
        return "repeated_lines"
    return "unbroken" if UNBROKEN.search(text) else None


class NearDuplicates:
    """MinHash LSH over word 5-grams: was a document of at least `threshold` estimated Jaccard similarity seen before?"""

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        # Prefer false candidates to missed ones: each candidate's similarity is estimated from all permutations.
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
        self._empty = MinHash(num_perm=PERMUTATIONS, seed=1, hashfunc=int)  # shingles come hashed
        self._sketches: dict[Any, Any] = {}
        self._words: dict[str, int] = {}

    def seen(self, key: str, text: str) -> bool:
        """Whether `text` is a near-duplicate of an earlier one; if not, it is remembered under `key`."""
        shingles = self.shingles(text)
        if not len(shingles):
            return False
        sketch = self._empty.copy()
        for begin in range(0, len(shingles), 1 << 16):  # bounds the memory of a very long document
            sketch.update_batch(shingles[begin : begin + (1 << 16)].tolist())
        if any(self._sketches[other].jaccard(sketch) >= self.threshold for other in self._index.query(sketch)):
            return True
        self._index.insert(key, sketch)
        self._sketches[key] = sketch
        return False

    def shingles(self, text: str) -> np.ndarray:
        """Hashes of the distinct word 5-grams, uint32; of the whole text if it has fewer words."""
        cache = self._words
        words = WORD.findall(text.lower())
        for word in words:
            if word not in cache:
                cache[word] = zlib.crc32(word.encode())
        hashes = np.fromiter((cache[word] for word in words), dtype=np.uint32, count=len(words))
        width = min(SHINGLE_WORDS, len(words))
        combined = np.zeros(max(0, len(words) - width + 1) if width else 0, dtype=np.uint32)
        for offset in range(width):  # a polynomial hash, modulo 2**32
            combined = combined * np.uint32(0x9E3779B1) + hashes[offset : offset + len(combined)]
        return np.unique(combined)


def hold_out(groups: list[str], fraction: float, seed: int) -> set[str]:
    """The groups held out for validation: those whose seeded hash falls below `fraction`, at least one and never all.

    A group's fate depends on itself and the seed alone, so that a grown corpus keeps its split. Empty when there are no two groups.
    """
    draws = {group: int(hashlib.sha256(f"{seed}:{group}".encode()).hexdigest()[:8], 16) / 2**32 for group in groups}
    if len(draws) < 2:
        return set()
    ranked = sorted(draws, key=lambda group: (draws[group], group))
    count = sum(draw < fraction for draw in draws.values())
    return set(ranked[: min(max(count, 1), len(ranked) - 1)])

"""The rows of a training phase: weights of params.yaml by domain against what the corpus holds."""

import math
import zlib
from typing import Any

import numpy as np

from k2.config import TokenizeConfig, TrainConfig
from k2.data import packing
from k2.data.packing import Documents
from k2.errors import ConfigError
from k2.tokenizer import ChatTokenizer

RECALL = "recall"  # made here, without limit (k2/data/recall.py)


def settle(phase: str, phases: dict[str, dict[str, float]], tokens: dict[str, int]) -> dict[str, float]:
    """The weights of `phase` over the domains that there are, summing to 1; `tokens` says how many the corpus has of each.

    The weight of a domain that the corpus lacks goes to those of its domains that no phase names (a user's own text), by size; if
    there are none, to the others in proportion. A domain that no phase names, with no weight left for it, is a ConfigError.
    """
    at = f"params.yaml: tokenize.phases.{phase}"
    weights = phases[phase]
    for domain, weight in weights.items():
        if not weight >= 0:
            raise ConfigError(f"{at}.{domain}: {weight} is negative; a weight is a share of the phase's tokens")
    present = {d: w for d, w in weights.items() if w > 0 and (d == RECALL or tokens.get(d))}
    missing = {d: w for d, w in weights.items() if w > 0 and d not in present}
    named = {domain for mixture in phases.values() for domain in mixture}
    unnamed = {d: n for d, n in tokens.items() if n and d not in named}
    free = sum(missing.values())
    if unnamed and not missing:
        domain = next(iter(unnamed))
        raise ConfigError(f"{at}: says nothing of the corpus's domain `{domain}`; give it a weight (0 leaves it out)")
    if missing:
        heirs = ", ".join(f"`{d}`" for d in unnamed) or "the other domains"
        print(f"{phase}: the corpus has no {', '.join(f'`{d}`' for d in missing)}; weight {free:.2g} goes to {heirs}")
    for domain, size in unnamed.items():
        present[domain] = free * size / sum(unnamed.values())
    total = sum(present.values())
    if not set(present) - {RECALL}:
        there = ", ".join(d for d in tokens if tokens[d]) or "no domain"
        raise ConfigError(f"{at}: no domain with a weight is in the corpus, which has {there}; give one of these a weight")
    return {domain: weight / total for domain, weight in present.items()}


def allocate(
    phase: str, weights: dict[str, float], tokens: dict[str, int], rows: int, seq_len: int, max_epochs: float
) -> dict[str, int]:
    """Rows of each domain, `rows` in all, by weight. What a domain lacks after max_epochs repetitions is taken from the others.

    If all together lack it, they are repeated more often, and a note says so.
    """
    limits = {d: math.inf if d == RECALL else int(tokens[d] * max_epochs / seq_len) for d in weights}
    shares = {d: weight * rows for d, weight in weights.items()}
    full: set[str] = set()
    while over := {d for d in weights if d not in full and shares[d] > limits[d]}:
        full |= over
        rest = {d: w for d, w in weights.items() if d not in full}
        if not rest or set(rest) == {RECALL}:  # recall alone is no corpus
            have = sum(n for d, n in tokens.items() if d in weights)
            wanted = sum(w for d, w in weights.items() if d != RECALL) * rows * seq_len
            print(f"{phase}: wants {wanted:,.0f} tokens of {have:,} in the corpus: repeated {wanted / max(1, have):.1f} times")
            shares = {d: weight * rows for d, weight in weights.items()}
            break
        left = rows - sum(limits[d] for d in full)
        for d in full:
            shares[d] = limits[d]
        for d in rest:
            shares[d] = left * weights[d] / sum(rest.values())
    else:
        for d in sorted(full):
            print(f"{phase}: `{d}` gives {limits[d] / rows:.0%} of the rows, not {weights[d]:.0%}, with max_epochs {max_epochs:g}")
    result = {d: int(share) for d, share in shares.items()}
    for d in sorted(shares, key=lambda d: (result[d] - shares[d], d))[: rows - sum(result.values())]:
        result[d] += 1  # largest remainders
    return result


def build(
    phase: str, train: TrainConfig, config: TokenizeConfig, domains: dict[str, Documents], tokenizer: ChatTokenizer, long: bool
) -> tuple[np.ndarray, dict[str, Any]]:
    """The rows of a phase, (rows, seq_len + 1), domains mixed and shuffled by seed, and what they are made of.

    With `long`, documents that fill a row on their own are preferred: short ones teach nothing about long context.
    """
    seed = zlib.crc32(f"{config.seed}:{phase}".encode())
    rng = np.random.default_rng(seed)
    tokens = {name: domain.tokens for name, domain in domains.items()}
    wanted = math.ceil(train.tokens / train.batch_tokens) * (train.batch_tokens // train.seq_len)  # whole steps
    counts = allocate(phase, settle(phase, config.phases, tokens), tokens, wanted, train.seq_len, config.max_epochs)
    parts, report = [], {}
    for name, rows in sorted(counts.items()):
        if not rows:
            continue
        if name == RECALL:
            filler = max(domains.values(), key=lambda domain: domain.tokens)
            parts.append(packing.recall_rows(tokenizer, filler, rows, train.seq_len, seed))
            report[name] = {"rows": rows}
            continue
        documents, need = domains[name], rows * train.seq_len
        if long:
            documents = documents.longest(train.seq_len, need)
        parts.append(packing.cut_rows(documents.stream(need + 1, rng), train.seq_len))
        report[name] = {"rows": rows, "epochs": round(need / documents.tokens, 3)}
    together = np.concatenate(parts)
    return together[rng.permutation(len(together))], {"rows": wanted, "tokens": wanted * train.seq_len, "domains": report}

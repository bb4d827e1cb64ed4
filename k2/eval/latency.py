"""How fast the rollout engine answers: percentiles over single requests, and the throughput of a batch."""

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from k2.serve.engine import Engine

PERCENTILES = (50, 90, 99)


def latency(engine: "Engine", prompt: list[int], new_tokens: int, requests: int, batch: int, seed: int) -> dict[str, float]:
    """Milliseconds to the first token and for each further one (p50, p90, p99 over requests), tokens per second of a batch.

    The engine answers a request whole, so each is timed twice, for one token and for `new_tokens`; the difference is the rest's.
    """
    engine.generate([prompt], max_new_tokens=2, temperature=1.0, seed=seed)  # the first call allocates
    first, each = [], []
    for i in range(requests):
        one, _ = timed(engine, [prompt], 1, seed + i)
        many, tokens = timed(engine, [prompt], new_tokens, seed + i)
        first.append(one * 1000)
        if tokens > 1:
            each.append(max(many - one, 0.0) * 1000 / (tokens - 1))
    seconds, tokens = timed(engine, [prompt] * batch, new_tokens, seed)
    result = {f"first_token_ms_p{p}": float(np.percentile(first, p)) for p in PERCENTILES}
    if each:
        result |= {f"token_ms_p{p}": float(np.percentile(each, p)) for p in PERCENTILES}
    return result | {"batch_tokens_per_second": tokens / seconds}


def timed(engine: "Engine", prompts: list[list[int]], new_tokens: int, seed: int) -> tuple[float, int]:
    """Seconds of a call and the tokens it gave."""
    start = time.perf_counter()
    completions = engine.generate(prompts, max_new_tokens=new_tokens, temperature=1.0, seed=seed)
    return time.perf_counter() - start, sum(len(completion.ids) for completion in completions)

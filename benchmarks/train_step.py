"""Tokens per second of a training step: ours against transformers' DeepseekV3ForCausalLM, in one run.

Same shape (params.yaml), same batch, same threads. Ours: bfloat16 weights with float32 masters, MuonClip with its statistics.
Theirs: float32 weights under bfloat16 autocast, experts by grouped_mm, fused AdamW. Steps alternate, so that both meet the same
machine; medians are compared. Then the share of the machine's matrix-product peak, and memory against sequence length.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from k2.config import ModelConfig, Params, load_params
from k2.model.hf import config_dict
from k2.model.transformer import Transformer
from k2.train.batches import Batch
from k2.train.trainer import Trainer

TARGET = 1.2  # ours over theirs


def ours(params: Params, tokens: torch.Tensor) -> Callable[[], None]:
    trainer = Trainer(
        Transformer(params.model).initialize(0), params.muonclip, params.pretrain.dtype, params.pretrain.bias_update_rate
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = Batch(inputs, targets, torch.ones(inputs.shape))
    return lambda: void(trainer.language_model_step([batch], params.pretrain.optim.lr))


def theirs(params: Params, tokens: torch.Tensor) -> Callable[[], None]:
    model = transformers_model(params.model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformers_model(config: ModelConfig) -> Any:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    fields = config_dict(config, "float32", {})
    known = {k: v for k, v in fields.items() if k not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**known), experts_implementation="grouped_mm")


def void(_: Any) -> None:
    pass


def seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def gemm_peak() -> float:
    """Best bfloat16 matrix product, GFLOP/s."""
    n = 2048
    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    return 2 * n**3 / min(seconds(lambda: void(a @ b)) for _ in range(10)) / 1e9


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Forward and backward of one token: 6 for each weight that it meets, and the causal attention's products."""
    with torch.device("meta"):
        model = Transformer(config)
    met = sum(p.numel() for n, p in model.named_parameters() if p.ndim >= 2 and "embed_tokens" not in n)
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = (config.n_routed_experts - config.num_experts_per_tok) * expert
    met -= idle * (config.num_hidden_layers - config.first_k_dense_replace)
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return 6 * met + 3 * config.num_hidden_layers * config.num_attention_heads * head * seq_len  # 3 passes, 2 flops, half masked


def peak_memory(params: Params, seq_len: int) -> float:
    """MiB that one forward and backward over a sequence holds at most, beside weights and gradients."""
    model = Transformer(params.model).initialize(0).cast(torch.bfloat16)
    tokens = torch.randint(params.model.vocab_size, (1, seq_len))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.collect(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model.hidden(tokens).sum().backward()
    now = highest = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # type: ignore[attr-defined]
            highest = max(highest, now)
    return highest / 2**20


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))))


def compare(params: Params, repetitions: int) -> float:
    config = params.pretrain
    shape = (config.micro_batch_tokens // config.seq_len, config.seq_len + 1)
    tokens = torch.randint(params.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    sides = {"ours, MuonClip": ours(params, tokens), "transformers, AdamW": theirs(params, tokens)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-1, repetitions):
        for name, step in sides.items():
            took = seconds(step)
            if i >= 0:  # the first step of each allocates
                times[name].append(took)
    peak, flops = gemm_peak(), flops_per_token(params.model, config.seq_len)
    count = config.micro_batch_tokens
    rows = []
    for name, took in times.items():
        speed = count / statistics.median(took)
        low, high = count / max(took), count / min(took)
        rows.append(
            [
                name,
                f"{speed:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{speed * flops / 1e9:,.0f}",
                f"{speed * flops / 1e7 / peak:.0f} %",
            ]
        )
    title = f"training step, {shape[0]} x {config.seq_len} tokens, {torch.get_num_threads()} threads, {repetitions} repetitions"
    table(title, ["", "tokens/s (median)", "range", "GFLOP/s", f"of {peak:,.0f} peak"], rows)
    return statistics.median(b / a for a, b in zip(*times.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    params = load_params("params.yaml")
    ratio = compare(params, repetitions)
    print(f"\n  ratio of neighbouring steps, median: {ratio:.2f} x (target {TARGET} x)")
    lengths = (512, 1024, 2048, 4096)
    memory = {n: peak_memory(params, n) for n in lengths}
    rows = [[f"{n}", f"{memory[n]:,.1f}", f"{memory[n] / n * 1024:,.1f}"] for n in lengths]
    table("memory of one sequence, forward and backward", ["tokens", "MiB", "KiB a token"], rows)


if __name__ == "__main__":
    main()

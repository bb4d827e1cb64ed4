"""A training step: ours against transformers' DeepseekV3ForCausalLM, in one run.

Same shape, same batch, same threads; steps alternate. Ours: bfloat16 weights with float32 masters, MuonClip with its statistics.
Theirs: float32 weights under bfloat16 autocast, experts by grouped_mm; once with torch.optim.Muon, to which each expert's matrix is
a parameter of its own, and AdamW for the rest; once with fused AdamW alone. Shapes: params.yaml's, and one four times its size.
Then the share of the machine's matrix-product peak, and memory against sequence length.
"""

# ruff: noqa: I001
from benchmarks.paired import Verdict, paired, ratio, seconds, summary, table

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

from k2.config import ModelConfig, Params, load_params
from k2.model.hf import config_dict
from k2.model.transformer import Transformer
from k2.train.batches import Batch
from k2.train.trainer import Trainer

MUON, ADAMW, PEAK = 2.5, 1.6, 35.0  # targets: times faster, times faster, percent


def four_times(model: ModelConfig) -> ModelConfig:
    """Twice as wide throughout."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size")
    return dataclasses.replace(model, **{name: 2 * getattr(model, name) for name in names})


def ours(params: Params, tokens: torch.Tensor) -> Callable[[], Any]:
    trainer = Trainer(
        Transformer(params.model).initialize(0), params.muonclip, params.pretrain.dtype, params.pretrain.bias_update_rate
    )
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    batch = Batch(inputs, targets, torch.ones(inputs.shape))
    return lambda: trainer.language_model_step([batch], params.pretrain.optim.lr)


def theirs(params: Params, tokens: torch.Tensor, muon: bool) -> Callable[[], None]:
    model = transformers_model(params.model).train()
    named = dict(model.named_parameters())
    matrices = [n for n, p in named.items() if p.ndim >= 2 and "embed_tokens" not in n and "lm_head" not in n] if muon else []
    slices = {n: [torch.nn.Parameter(t) for t in named[n].data] if named[n].ndim == 3 else [named[n]] for n in matrices}
    rest = [p for n, p in named.items() if n not in slices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]
    if muon:
        each = [s for parts in slices.values() for s in parts]
        optimizers.append(torch.optim.Muon(each, lr=1e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parts in slices.items():
            if named[name].ndim == 3:  # views of the stacked weight and of its gradient
                for part, grad in zip(parts, named[name].grad, strict=True):  # type: ignore[arg-type]
                    part.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    return step


def transformers_model(config: ModelConfig) -> Any:
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    fields = config_dict(config, "float32", {})
    known = {k: v for k, v in fields.items() if k not in ("architectures", "model_type", "dtype")}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(DeepseekV3Config(**known), experts_implementation="grouped_mm")


def gemm_peak() -> float:
    """Best bfloat16 matrix product, GFLOP/s."""
    n = 2048
    a, b = torch.randn(n, n).bfloat16(), torch.randn(n, n).bfloat16()
    return 2 * n**3 / min(seconds(lambda: a @ b) for _ in range(20)) / 1e9


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


def compare(name: str, params: Params, repetitions: int) -> list[Verdict]:
    config = params.pretrain
    shape = (config.micro_batch_tokens // config.seq_len, config.seq_len + 1)
    tokens = torch.randint(params.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    mine, muon, adamw = "ours, MuonClip", "transformers, torch.optim.Muon + AdamW", "transformers, AdamW"
    times = paired(
        {mine: ours(params, tokens), muon: theirs(params, tokens, True), adamw: theirs(params, tokens, False)}, repetitions
    )
    peak, flops, count = gemm_peak(), flops_per_token(params.model, config.seq_len), config.micro_batch_tokens
    rows, share = [], {}
    for side, took in times.items():
        speed = count / statistics.median(took)
        share[side] = speed * flops / 1e7 / peak
        low, high = count / max(took), count / min(took)
        rows.append([side, f"{speed:,.0f}", f"{low:,.0f} to {high:,.0f}", f"{speed * flops / 1e9:,.0f}", f"{share[side]:.0f} %"])
    title = (
        f"training step, {name}, {shape[0]} x {config.seq_len} tokens, {torch.get_num_threads()} threads, {repetitions} repetitions"
    )
    table(title, ["", "tokens/s (median)", "range", "GFLOP/s", f"of {peak:,.0f} peak"], rows)
    work = f"training step, {name}"
    return [
        Verdict(work, muon, ratio(times[mine], times[muon]), MUON),
        Verdict(work, adamw, ratio(times[mine], times[adamw]), ADAMW),
        Verdict(work, "bfloat16 GEMM peak", share[mine], PEAK, "%"),
    ]


def main() -> list[Verdict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    params = load_params("params.yaml")
    verdicts = compare("nano", params, repetitions)
    wide = dataclasses.replace(params, model=four_times(params.model))
    verdicts += compare("4x nano", wide, max(3, repetitions // 2))
    lengths = (512, 1024, 2048, 4096)
    memory = {n: peak_memory(params, n) for n in lengths}
    rows = [[f"{n}", f"{memory[n]:,.1f}", f"{memory[n] / n * 1024:,.1f}"] for n in lengths]
    table("memory of one sequence, forward and backward", ["tokens", "MiB", "KiB a token"], rows)
    return verdicts


if __name__ == "__main__":
    summary(main())

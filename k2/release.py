"""What turns a trained model into a release: proof that transformers computes the same, generation defaults, a model card."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from k2.config import ModelConfig
from k2.errors import K2Error
from k2.model.moe import Router
from k2.model.transformer import Transformer
from k2.tokenizer.chat import ChatTokenizer

TOLERANCE = 1e-4  # of a logit, float32
TIE = 1e-5  # selection scores nearer than this may be ordered differently by two right implementations
TEMPERATURE = 0.6  # K2's recommendation for sampling
DIALOGUE = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3+3?"},
]


def context(config: ModelConfig) -> int:
    """Tokens that the model was made for."""
    return round(config.max_position_embeddings * (config.yarn.factor if config.yarn else 1))


@torch.inference_mode()
def logit_difference(model: Transformer, folder: Path, seed: int = 0) -> float:
    """Largest difference between our logits and those of the folder opened by transformers, float32, on random tokens in sequences
    that reach beyond the context before YaRN. Sequences in which a router hesitates (TIE) prove nothing and are left out.

    K2Error if transformers cannot open the folder or the difference is above TOLERANCE.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise K2Error(f"{folder}: transformers cannot open it ({' '.join(str(error).split())}); not published") from None
    T = min(context(model.config), model.config.max_position_embeddings + 128)
    tokens = torch.randint(model.config.vocab_size, (4, T), generator=torch.Generator().manual_seed(seed))
    ours, margin = _with_margin(model, tokens)
    apart = (ours - other(tokens).logits).abs().amax((1, 2))
    clear = margin > TIE
    worst = float(apart[clear if clear.any() else slice(None)].max())
    if not worst <= TOLERANCE:
        raise K2Error(f"{folder}: transformers' logits differ from ours by {worst:.2g}, above {TOLERANCE}; not published")
    return worst


def _with_margin(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) and, for each sequence, the least gap between the last expert chosen and the first one left out (B,)."""
    gaps = [torch.full((len(tokens),), torch.inf)]

    def watch(router: torch.nn.Module, inputs: tuple[Tensor], _: Any) -> None:
        assert isinstance(router, Router)
        scores = F.linear(inputs[0].float(), router.weight).sigmoid() + router.e_score_correction_bias
        if scores.shape[1] > router.top_k:
            top = scores.topk(router.top_k + 1, dim=1).values
            gaps.append((top[:, -2] - top[:, -1]).view(len(tokens), -1).amin(1))

    hooks = [router.register_forward_hook(watch) for router in model.routers()]
    try:
        return model(tokens), torch.stack(gaps).amin(0)
    finally:
        for hook in hooks:
            hook.remove()


def check_tokenizer(folder: Path) -> None:
    """K2Error unless transformers' tokenizer and chat template give the tokens that the model was trained on."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = theirs.apply_chat_template(DIALOGUE, add_generation_prompt=True, tokenize=True, return_dict=False)
    if list(found) != ChatTokenizer.load(folder).encode_chat(DIALOGUE, add_generation_prompt=True)[0]:
        raise K2Error(f"{folder}: transformers renders a dialogue to other tokens than training did; not published")


def write_generation_config(folder: Path, config: ModelConfig, tokenizer: ChatTokenizer) -> None:
    """generation_config.json: stop at <|im_end|>, sample at K2's temperature."""
    values = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.im_end_id,
        "pad_token_id": tokenizer.pad_id,
        "do_sample": True,
        "temperature": TEMPERATURE,
        "max_length": context(config),
    }
    (folder / "generation_config.json").write_text(json.dumps(values, indent=2) + "\n")


def write_card(folder: Path, name: str, model: Transformer, metrics: Mapping[str, float], commit: str) -> None:
    """README.md: what the model is, how to use it, what it scores, what it was made from."""
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    rows = {
        "Parameters": f"{total:,}",
        "Layers": f"{config.num_hidden_layers}, the first {config.first_k_dense_replace} dense",
        "Experts": f"{config.n_routed_experts} routed, {config.num_experts_per_tok} for a token, {config.n_shared_experts} shared",
        "Attention": f"MLA, {config.num_attention_heads} heads, latent of {config.kv_lora_rank}",
        "Context": f"{context(config):,} tokens" + (f" (YaRN, factor {config.yarn.factor:g})" if config.yarn else ""),
        "Vocabulary": f"{config.vocab_size:,}",
        "Weights": "float32, as trained",
        "Code": commit or "unknown",
    }
    scores = [f"| {key} | {value:.4g} |" for key, value in metrics.items()]
    text = CARD.format(
        name=name,
        facts="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        scores="\n".join(["| Metric | Value |", "|---|---|", *scores]) if scores else "Not evaluated.",
        temperature=TEMPERATURE,
    )
    (folder / "README.md").write_text(text)


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [deepseek_v3, mixture-of-experts, kimi-k2-recipe]
---

# {name}

A language model made by Kimi K2's recipe (arXiv 2507.20534): pre-training with MuonClip, annealing, context extension, supervised
fine-tuning on dialogues with tools, reinforcement learning with verifiable rewards.

| | |
|---|---|
{facts}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".")
messages = [{{"role": "user", "content": "What is 2+2?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs)[0]))
```

Sampling temperature {temperature}, as K2 recommends; a turn ends with `<|im_end|>`. The architecture is `DeepseekV3ForCausalLM`.

## Evaluation

{scores}
"""

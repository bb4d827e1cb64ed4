"""The whole model, pre-norm: embedding, layers of MLA and MLP or MoE, head. Parameter names are Hugging Face's
DeepseekV3ForCausalLM.

Legend: B batch, T tokens, C = hidden_size, V = vocab_size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from k2.config import ModelConfig
from k2.model import rope
from k2.model.attention import Packing
from k2.model.mla import MLA, Latents
from k2.model.moe import MLP, MoE, Router
from k2.model.norm import RMSNorm


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.self_attn = MLA(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if index < config.first_k_dense_replace else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, *attention_args) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention_args)
        return x + self.mlp(self.post_attention_layernorm(x))

    def decode(self, x: Tensor, *attention_args) -> Tensor:
        x = x + self.self_attn.decode(self.input_layernorm(x), *attention_args)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Transformer(nn.Module):
    """DeepSeek-V3's architecture with K2's configuration."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.inv_freq = rope.inverse_frequencies(config)  # a plain attribute, so that .to(dtype) leaves it in float32
        self.rotary_scale = rope.rotary_scale(config)

    @torch.no_grad()
    def initialize(self, seed: int) -> "Transformer":
        """Normal weights of std initializer_range, norms at 1, from a generator of its own: the same weights for a seed on any
        device."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1)
            else:
                p.copy_(torch.empty(p.shape).normal_(0, self.config.initializer_range, generator=generator))
        return self

    def cast(self, dtype: torch.dtype) -> "Transformer":
        """Everything to `dtype` but the routers, which stay float32."""
        kept = [(router, router.weight.data, router.e_score_correction_bias) for router in self.routers()]
        self.to(dtype)
        for router, weight, bias in kept:  # not there and back again, which would round them
            router.weight.data, router.e_score_correction_bias = weight.float(), bias.float()
        return self

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope.rotation(positions, self.inv_freq.to(positions.device), self.rotary_scale, self.lm_head.weight.dtype)

    def hidden(self, tokens_BT: Tensor, packing: Packing | None = None, cache: list[Latents] | None = None) -> Tensor:
        """Final normalised states (B, T, C). With `packing`, B is 1 and the row holds several sequences that do not see each
        other."""
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) if packing is None else packing.positions
        cos, sin = self.rotation(positions)
        x = self.model.embed_tokens(tokens_BT)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, packing, cache[i] if cache else None)
        return self.model.norm(x)

    def forward(self, tokens_BT: Tensor, packing: Packing | None = None) -> Tensor:
        """Logits (B, T, V)."""
        return self.lm_head(self.hidden(tokens_BT, packing))

    def decode(self, tokens_B: Tensor, at_B: Tensor, cache: list[Latents], visible_BS: Tensor) -> Tensor:
        """Logits (B, V) after one more token a row, at position at_B, whose latents join the cache."""
        cos, sin = self.rotation(at_B[:, None])
        x = self.model.embed_tokens(tokens_B[:, None])
        for layer, latents in zip(self.model.layers, cache, strict=True):
            x = layer.decode(x, cos, sin, latents, at_B, visible_BS)  # type: ignore[operator]
        return self.lm_head(self.model.norm(x))[:, 0]

    def attentions(self) -> list[MLA]:
        return [layer.self_attn for layer in self.model.layers]  # type: ignore[misc]

    def routers(self) -> list[Router]:
        return [layer.mlp.gate for layer in self.model.layers if isinstance(layer.mlp, MoE)]  # type: ignore[misc]

    def collect(self, on: bool) -> None:
        """Start a step's statistics: max logits at minus infinity, expert loads at zero (or stop collecting)."""
        device = self.lm_head.weight.device
        for attention in self.attentions():
            attention.max_logit = torch.full((self.config.num_attention_heads,), -torch.inf, device=device) if on else None
        for router in self.routers():
            router.load = torch.zeros(self.config.n_routed_experts, dtype=torch.int64, device=device) if on else None

    def matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that Muon takes: all but embedding, head and norms. Stacked ones (3-D) and gate_up hold several
        matrices."""
        for name, p in self.named_parameters():
            if p.ndim >= 2 and not name.startswith(("model.embed_tokens", "lm_head")):
                yield name, p

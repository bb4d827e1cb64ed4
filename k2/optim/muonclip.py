"""MuonClip (K2 report, algorithm 1): Muon for matrices, AdamW for the rest, QK-Clip after the update. One optimizer, float32
masters.

Where the report is silent, Moonlight (arXiv 2502.16982) decides: Nesterov momentum, five Newton-Schulz steps in bfloat16, AdamW for
embedding, head and norms, weight decay on everything. Momentum convention: buf = momentum * buf + grad. torch.optim.Muon's
lerp convention holds (1 - momentum) times that; Newton-Schulz normalises, so the updates are equal, but the state is not
interchangeable.
"""

# pyright: reportPrivateImportUsage=false
import math

import torch
from torch import Tensor

from k2.config import MuonClipConfig
from k2.model.transformer import Transformer
from k2.optim.newton_schulz import newton_schulz


def split_matrices(name: str, t: Tensor) -> Tensor:
    """(count, n, m) view of the matrices in a parameter or its gradient: gate and up apart, each expert on its own."""
    if "gate_up_proj" in name:
        return t.unflatten(-2, (2, -1)).flatten(0, -3) if t.ndim == 3 else t.unflatten(0, (2, -1))
    return t if t.ndim == 3 else t[None]


class MuonClip:
    """Call `step(lr)` after backward; it clips the raw gradient, updates, applies QK-Clip from the model's collected maxima, and
    clears the gradients. Every parameter is claimed exactly once: `self.muon` and `self.adamw_names`."""

    def __init__(self, model: Transformer, config: MuonClipConfig) -> None:
        self.model, self.config = model, config
        self.params = dict(model.named_parameters())
        self.master = {n: p.detach() if p.dtype == torch.float32 else p.detach().float() for n, p in self.params.items()}
        self.muon = [name for name, _ in model.matrices()]
        self.grads: dict[str, Tensor] = {}
        self.momentum = {n: torch.zeros_like(self.master[n]) for n in self.muon}
        self.adamw_names = [n for n in self.params if n not in self.momentum]
        self.adamw = torch.optim.AdamW(
            [self.master[n] for n in self.adamw_names], lr=0.0, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        # matrices of one shape, up to transposition, go through Newton-Schulz together
        self.buckets: dict[tuple[int, int], list[str]] = {}
        for name in self.muon:
            n, m = split_matrices(name, self.master[name]).shape[-2:]
            self.buckets.setdefault((min(n, m), max(n, m)), []).append(name)

    def accumulate(self) -> None:
        """Take the gradients of a backward pass; several are summed in float32, whatever dtype the model computes in. `step` does
        it for the last one."""
        for name, p in self.params.items():
            if p.grad is not None:
                self.grads[name] = self.grads[name].float().add_(p.grad) if name in self.grads else p.grad
                p.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> dict[str, float]:
        """One update. Returns optim/grad_norm (of the raw gradient), optim/update_rms (of Muon's update before the learning rate),
        attn/max_logit, attn/max_logit_layer_<i> and attn/clipped_heads."""
        self.accumulate()
        grads, self.grads = self.grads, {}
        missing = [n for n in self.params if n not in grads]
        assert not missing, f"no gradient for {missing}"
        norm = torch.stack([torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32).norm() for g in grads.values()]).norm()
        clip = 1.0 if self.config.max_grad_norm is None else min(1.0, self.config.max_grad_norm / (norm.item() + 1e-6))
        square = torch.stack([self._muon_update(shape, names, grads, clip, lr) for shape, names in self.buckets.items()]).sum()
        count = sum(self.master[n].numel() for n in self.muon)
        self._adamw_update(grads, clip, lr)
        stats = self._qk_clip()
        live = [(p, self.master[n]) for n, p in self.params.items() if p.dtype != torch.float32]
        for p, master in live:
            p.copy_(master)
        return {"optim/grad_norm": norm.item(), "optim/update_rms": math.sqrt(square.item() / count), **stats}

    def _adamw_update(self, grads: dict[str, Tensor], clip: float, lr: float) -> None:
        self.adamw.param_groups[0]["lr"] = lr
        for name in self.adamw_names:
            self.master[name].grad = grads[name].float().mul_(clip) if clip < 1 else grads[name].float()
        self.adamw.step()
        for name in self.adamw_names:
            self.master[name].grad = None

    def _muon_update(self, shape: tuple[int, int], names: list[str], grads: dict[str, Tensor], clip: float, lr: float) -> Tensor:
        """Momentum, orthogonalisation, decay and update of the matrices of one shape; the sum of the update's squares."""
        config, (short, long) = self.config, shape
        stack = torch.empty(
            sum(self._matrices(n) for n in names), short, long, dtype=torch.bfloat16, device=self.master[names[0]].device
        )
        parts = stack.split([self._matrices(n) for n in names])
        for name, part in zip(names, parts, strict=True):
            buffer = self.momentum[name].mul_(config.momentum).add_(grads[name], alpha=clip)
            ahead = torch.add(buffer * config.momentum, grads[name], alpha=clip) if config.nesterov else buffer
            d = split_matrices(name, ahead)
            part.copy_(d.mT if d.shape[-2] > d.shape[-1] else d)
        update = newton_schulz(stack, config.ns_steps)
        scale = config.rms_scale * math.sqrt(long)
        for name, part in zip(names, update.split([len(p) for p in parts]), strict=True):
            master = split_matrices(name, self.master[name])
            master.mul_(1 - lr * config.weight_decay)
            master.add_(part.mT if master.shape[-2] > master.shape[-1] else part, alpha=-lr * scale)
        return torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).square().sum() * scale**2

    def _matrices(self, name: str) -> int:
        return len(split_matrices(name, self.master[name]))

    def _qk_clip(self) -> dict[str, float]:
        """Scale the masters of the heads whose maximum went above tau: W_qc and W_kc by sqrt(gamma), W_qr by gamma, W_kr and W_v
        not at all."""
        maxima = [a.max_logit for a in self.model.attentions()]
        if any(m is None for m in maxima):
            return {}
        logits_LH, tau, clipped = torch.stack(maxima), self.config.qk_clip_tau, 0  # type: ignore[arg-type]
        if tau is not None and (logits_LH > tau).any():
            clipped = int((logits_LH > tau).sum())
            gamma_LH = torch.where(logits_LH > tau, tau / logits_LH, 1.0)
            model = self.model.config
            query = "q_proj" if model.q_lora_rank is None else "q_b_proj"
            for i, gamma in enumerate(gamma_LH):
                at = f"model.layers.{i}.self_attn."
                q = self.master[f"{at}{query}.weight"].unflatten(0, (model.num_attention_heads, -1))
                kv = self.master[f"{at}kv_b_proj.weight"].unflatten(0, (model.num_attention_heads, -1))
                q[:, : model.qk_nope_head_dim] *= gamma.sqrt()[:, None, None]
                q[:, model.qk_nope_head_dim :] *= gamma[:, None, None]
                kv[:, : model.qk_nope_head_dim] *= gamma.sqrt()[:, None, None]
        layers = {f"attn/max_logit_layer_{i}": v for i, v in enumerate(logits_LH.amax(1).tolist())}
        return {"attn/max_logit": logits_LH.max().item(), "attn/clipped_heads": float(clipped), **layers}

    def state(self) -> dict[str, Tensor]:
        """Everything that a resume needs, as named tensors: masters, momenta, Adam's moments and step."""
        tensors = {f"master.{n}": t for n, t in self.master.items()} | {f"momentum.{n}": t for n, t in self.momentum.items()}
        for name in self.adamw_names:
            for key, value in self.adamw.state.get(self.master[name], {}).items():
                tensors[f"adamw.{key}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        for name, p in self.params.items():
            self.master[name].copy_(tensors[f"master.{name}"])
            p.copy_(self.master[name])
        for name, buffer in self.momentum.items():
            buffer.copy_(tensors[f"momentum.{name}"])
        for name in self.adamw_names:
            keys = ("step", "exp_avg", "exp_avg_sq")
            self.adamw.state[self.master[name]] = {
                k: tensors[f"adamw.{k}.{name}"].clone() for k in keys if f"adamw.{k}.{name}" in tensors
            }

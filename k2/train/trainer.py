"""A model and its optimizer as one: accumulate over micro-batches, step, balance the router. The seam where processes are added."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from k2.config import MuonClipConfig
from k2.errors import K2Error
from k2.model.transformer import Transformer
from k2.optim.muonclip import MuonClip
from k2.train.batches import Batch
from k2.train.loss import linear_cross_entropy

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Trainer:
    """Holds float32 masters (in the optimizer) and computes in `dtype`."""

    def __init__(
        self, model: Transformer, config: MuonClipConfig, dtype: str, bias_update_rate: float, device: str = "cpu"
    ) -> None:
        self.model, self.device, self.bias_update_rate = model.to(device), device, bias_update_rate
        masters = {n: p.detach().clone().float() for n, p in model.named_parameters()} if dtype != "float32" else None
        model.cast(DTYPES[dtype])
        self.optimizer = MuonClip(model, config)
        if masters:  # the masters start from the weights as given, not from their bfloat16 rounding
            for name, master in self.optimizer.master.items():
                master.copy_(masters[name])
        for attention in model.attentions():
            attention.exact_above = math.inf if config.qk_clip_tau is None else config.qk_clip_tau

    def language_model_step(self, batches: list[Batch], lr: float) -> dict[str, float]:
        """One step on the mean negative log-likelihood of the weighted targets, nats a token."""
        total = sum(float(b.weights.sum()) for b in batches)

        def losses() -> Iterable[Tensor]:
            for batch in batches:
                yield self.nll(batch, 1 / total)

        return self.step(losses(), lr)

    def nll(self, batch: Batch, scale: float) -> Tensor:
        """`scale` times the weighted sum of a batch's negative log-likelihoods, nats."""
        packing = batch.packing and batch.packing.to(self.device)
        hidden = self.model.hidden(batch.inputs.to(self.device), packing).flatten(0, 1)
        weights = batch.weights.to(self.device).flatten() * scale
        return linear_cross_entropy(hidden, self.model.lm_head.weight, batch.targets.to(self.device).flatten(), weights)

    def step(self, losses: Iterable[Tensor], lr: float) -> dict[str, float]:
        """Backward through each loss as it comes, then one update. train/loss is their sum, the rest the step's statistics."""
        self.model.collect(True)
        total = 0.0
        for loss in losses:
            loss.backward()
            self.optimizer.accumulate()
            total += loss.item()
            if not math.isfinite(total):
                raise K2Error(f"the loss is {total}; lower the learning rate or look at the data (the last saved step is kept)")
        stats = {"train/loss": total} | self.optimizer.step(lr) | self._balance()
        self.model.collect(False)
        return stats

    def _balance(self) -> dict[str, float]:
        """Move the routers' biases; moe/max_violation is (largest load - mean load) / mean load, of each MoE layer and the most."""
        stats = {}
        for i, layer in enumerate(self.model.model.layers):
            router = getattr(layer.mlp, "gate", None)
            if router is not None:
                load = router.load.float()
                stats[f"moe/max_violation_layer_{i}"] = (load.max() / load.mean() - 1).item()
                router.update_bias(self.bias_update_rate)
        return {"moe/max_violation": max(stats.values(), default=0.0)} | stats

    def state(self) -> dict[str, Tensor]:
        """All that a bit-exact resume needs, as named tensors."""
        biases = {f"bias.{i}": router.e_score_correction_bias for i, router in enumerate(self.model.routers())}
        return self.optimizer.state() | biases

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer.load_state(tensors)
        for i, router in enumerate(self.model.routers()):
            router.e_score_correction_bias.copy_(tensors[f"bias.{i}"])

"""Weights from the trainer to the rollout engines, after MoonshotAI/checkpoint-engine (K2 report, section 3.3 and appendix G).

    register(name, tensors)    a copy of the trainer's weights, so that training may go on
    gather(name)               what is in it: buckets of whole tensors, each with dtype, shape, offset and checksum
    update(name, transports)   bucket by bucket through a double buffer: the receivers load one while the next is being copied
    unregister(name)           frees the copy

A receiver checks every tensor's checksum and swaps its weights only when all have arrived: an error comes back as text, stops both
sides, and leaves the engine with its old version.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from k2.errors import K2Error
from k2.sync.buckets import Bucket, TensorMeta, aligned, checksum
from k2.sync.transport import Transport

BUCKET_BYTES = 32 << 20


class CheckpointEngine:
    """The sending side. `bucket_bytes` bounds a bucket, unless one tensor alone is larger: tensors are never split."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._registered: dict[str, tuple[list[Bucket], list[Tensor]]] = {}

    @torch.no_grad()
    def register(self, name: str, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the tensors into host buffers. The name must be free: a version that is being sent is never overwritten."""
        if name in self._registered:
            raise K2Error(f"checkpoint {name} is already registered; unregister it first")
        buckets, buffers = [], []
        for group in self._groups(named_tensors):
            buffer = torch.zeros(sum(aligned(t.nbytes) for _, t in group), dtype=torch.uint8)
            metas, offset = [], 0
            for tensor_name, t in group:
                place = buffer[offset : offset + t.nbytes]
                place.view(t.dtype).view(t.shape).copy_(t)
                metas.append(TensorMeta(tensor_name, t.dtype, tuple(t.shape), offset, t.nbytes, checksum(place)))
                offset += aligned(t.nbytes)
            buckets.append(Bucket(tuple(metas), len(buffer)))
            buffers.append(buffer)
        self._registered[name] = buckets, buffers

    def gather(self, name: str) -> list[Bucket]:
        """The buckets of a registered checkpoint, in the order in which they are sent."""
        return self._find(name)[0]

    def update(self, name: str, transports: Sequence[Transport], version: int) -> None:
        """Send a registered checkpoint to every receiver. K2Error with their errors if one fails: then none changes its weights."""
        buckets, buffers = self._find(name)
        largest = max(bucket.size for bucket in buckets)
        try:
            self._all(transports, "begin", (largest, version))
            for i, (bucket, buffer) in enumerate(zip(buckets, buffers, strict=True)):
                for transport in transports:  # half i % 2 is free: its last bucket was acknowledged before bucket i - 1 was posted
                    transport.buffer(i % 2)[: bucket.size].copy_(buffer)
                if i:
                    self._acknowledge(transports)
                for transport in transports:
                    transport.post("load", (i % 2, bucket.tensors))
            self._acknowledge(transports)
            self._all(transports, "check", ())  # everyone is ready before anyone swaps
            self._all(transports, "commit", ())
        except BaseException:
            for transport in transports:
                transport.abort()
            raise

    def unregister(self, name: str) -> None:
        self._find(name)
        del self._registered[name]

    def push(self, named_tensors: Iterable[tuple[str, Tensor]], transports: Sequence[Transport], version: int) -> None:
        """Register, update and unregister in one: what a synchronous RL step does after its update."""
        name = f"version {version}"
        self.register(name, named_tensors)
        try:
            self.update(name, transports, version)
        finally:
            self.unregister(name)

    def _find(self, name: str) -> tuple[list[Bucket], list[Tensor]]:
        if name not in self._registered:
            raise K2Error(f"checkpoint {name} is not registered; known: {', '.join(self._registered) or 'none'}")
        return self._registered[name]

    def _groups(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterable[list[tuple[str, Tensor]]]:
        group: list[tuple[str, Tensor]] = []
        size = 0
        for name, t in named_tensors:
            if group and size + aligned(t.nbytes) > self.bucket_bytes:
                yield group
                group, size = [], 0
            group.append((name, t.detach()))
            size += aligned(t.nbytes)
        if not group:
            raise K2Error("a checkpoint without tensors cannot be registered")
        yield group

    def _all(self, transports: Sequence[Transport], verb: str, args: tuple) -> None:
        for transport in transports:
            transport.post(verb, args)
        self._acknowledge(transports)

    def _acknowledge(self, transports: Sequence[Transport]) -> None:
        errors = [f"receiver {i}: {error}" for i, t in enumerate(transports) if (error := t.wait())]
        if errors:
            raise K2Error(f"weight sync stopped, every engine keeps its old version: {'; '.join(errors)}")

"""The receiving side of a weight sync, beside one rollout engine."""

import torch
from torch import Tensor

from k2.serve.engine import Engine
from k2.sync.buckets import TensorMeta, checksum


class Receiver:
    """Verbs that a transport calls, one at a time. New weights gather beside the old ones, so that there are two sets during a
    sync, and go into the engine together, at `commit`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.halves = (torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8))
        self._arrived: dict[str, Tensor] = {}
        self._version: int | None = None

    def begin(self, bucket_bytes: int, version: int) -> None:
        """Make room for the largest bucket, twice."""
        if len(self.halves[0]) < bucket_bytes:
            self.halves = (torch.empty(bucket_bytes, dtype=torch.uint8), torch.empty(bucket_bytes, dtype=torch.uint8))
        self._arrived, self._version = {}, version

    def load(self, half: int, tensors: tuple[TensorMeta, ...]) -> None:
        """Take a bucket out of one half of the double buffer."""
        assert self._version is not None, "load before begin"
        for meta in tensors:
            found = checksum(self.halves[half][meta.offset : meta.offset + meta.size])
            if found != meta.checksum:
                raise ValueError(f"{meta.name}: checksum {found:08x} is not the sender's {meta.checksum:08x}")
            self._arrived[meta.name] = meta.view(self.halves[half]).clone()

    def check(self) -> None:
        """Everything is there and fits the engine's model."""
        self.engine.check_weights(self._arrived)

    def commit(self) -> None:
        assert self._version is not None, "commit before begin"
        self.engine.update(self._arrived.items(), self._version)
        self.abort()

    def abort(self) -> None:
        """Forget what has arrived."""
        self._arrived, self._version = {}, None

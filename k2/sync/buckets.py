"""What travels: buckets of whole tensors, each with its place and checksum."""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes, of each tensor in its bucket


@dataclass(frozen=True)
class TensorMeta:
    """Where a tensor lies in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes
    size: int  # bytes
    checksum: int  # CRC-32 of the bytes

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor itself, in a uint8 buffer that holds its bucket."""
        return buffer[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    tensors: tuple[TensorMeta, ...]
    size: int  # bytes


def checksum(data: Tensor) -> int:
    """CRC-32 of a uint8 tensor's bytes: 3 GB/s."""
    return zlib.crc32(data.cpu().numpy().data)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

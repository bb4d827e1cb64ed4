"""Packed token rows on disk: <phase>.bin holds rows of seq_len + 1 tokens, little-endian, already mixed and shuffled.

A row's inputs are its first seq_len tokens, its targets the last seq_len. index.json says how many rows, how long, which type.
`validation.bytes.bin` holds, for each row, the UTF-8 bytes of its targets: with it the loss becomes bits per byte, which compares
runs of different tokenizers. Files are memory-mapped: a reader costs no memory, whatever the corpus.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from k2.errors import K2Error

if TYPE_CHECKING:
    import torch

INDEX = "index.json"


class TokenRows:
    """The rows of one phase of a tokens folder. K2Error when the phase is not there or a file has not the indexed length."""

    def __init__(self, folder: Path | str, phase: str) -> None:
        folder = Path(folder)
        try:
            index = json.loads((folder / INDEX).read_text())
        except (OSError, ValueError):
            raise K2Error(f"{folder / INDEX}: missing or not readable; run the tokenize stage again") from None
        if phase not in index:
            raise K2Error(f"{folder / INDEX}: no phase `{phase}` (there are: {', '.join(index)}); run the tokenize stage again")
        self.rows: int = index[phase]["rows"]
        self.row_tokens: int = index[phase]["row_tokens"]
        self._tokens = _map(folder / f"{phase}.bin", np.dtype(index[phase]["dtype"]), (self.rows, self.row_tokens))
        sizes = folder / f"{phase}.bytes.bin"
        self._bytes = _map(sizes, np.dtype("<i4"), (self.rows,)) if sizes.exists() else None

    def read(self, indices: np.ndarray) -> "torch.Tensor":
        """Rows by index, (n, row_tokens) int64."""
        import torch  # the tokenize stage writes rows without waiting for it

        return torch.from_numpy(self._tokens[indices].astype(np.int64))

    def bytes(self, indices: np.ndarray) -> np.ndarray:
        """UTF-8 bytes of the targets of each row, (n,) int64; for phases that were written with them (validation)."""
        if self._bytes is None:
            raise K2Error("this phase was written without byte counts; only validation has them")
        return self._bytes[indices].astype(np.int64)


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest token type: uint16 up to 65,536 tokens, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_rows(folder: Path, phase: str, rows: np.ndarray, byte_counts: np.ndarray | None = None) -> None:
    """Write a phase's rows, (n, row_tokens) of a type of dtype_for, and enter it in the index."""
    rows.tofile(folder / f"{phase}.bin")
    if byte_counts is not None:
        byte_counts.astype("<i4").tofile(folder / f"{phase}.bytes.bin")
    path = folder / INDEX
    index = json.loads(path.read_text()) if path.exists() else {}
    index[phase] = {"rows": len(rows), "row_tokens": rows.shape[1], "dtype": rows.dtype.str}
    path.write_text(json.dumps(index, indent=1) + "\n")


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    try:
        return np.memmap(path, dtype=dtype, mode="r", shape=shape)
    except (OSError, ValueError):
        raise K2Error(f"{path}: missing or shorter than its index says; run the tokenize stage again") from None

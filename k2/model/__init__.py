"""K2's architecture. `load` and `save` speak the Hugging Face format."""

from k2.model.hf import load, save

__all__ = ["load", "save"]

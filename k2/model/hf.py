"""The model as a Hugging Face folder (DeepseekV3ForCausalLM): config.json, model.safetensors and the tokenizer's files, both ways.

Our stacked weights are several tensors there: experts' gate_up_proj (E, 2F, C) and down_proj (E, C, F) one for each expert, and any
gate_up_proj is gate_proj above up_proj. Everything else has the same name and shape.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from k2.config import ModelConfig, YarnConfig
from k2.errors import K2Error
from k2.model import rope
from k2.model.transformer import Transformer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FIXED = {  # what this architecture does, beside the fields of ModelConfig; a config.json that says otherwise is refused
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}


# -- writing -----------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def save(
    model: Transformer, config: ModelConfig, folder: Path | str, tokenizer_folder: Path | str | None = None,
    masters: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write `folder`. With the optimizer's float32 `masters` (by our parameter names) the file is float32, so that nothing is lost
    between stages; without, it has the model's dtype."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict() | dict(masters or {})
    tensors = {name: t.detach().cpu().contiguous() for name, t in hf_views(state).items()}
    dtype = str(state["lm_head.weight"].dtype).removeprefix("torch.")
    ids = token_ids(Path(tokenizer_folder)) if tokenizer_folder else {}
    (folder / "config.json").write_text(json.dumps(config_dict(config, dtype, ids), indent=2, sort_keys=True) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer_folder:
        for name in TOKENIZER_FILES:
            if Path(tokenizer_folder) != folder:
                shutil.copyfile(Path(tokenizer_folder) / name, folder / name)


def hf_views(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of Transformer under Hugging Face's names: views, so that copying into them fills ours."""
    views: dict[str, Tensor] = {}
    for name, t in state.items():
        if name.endswith(".experts.gate_up_proj"):
            for e, expert in enumerate(t):
                at = name.removesuffix("gate_up_proj") + str(e)
                views[f"{at}.gate_proj.weight"], views[f"{at}.up_proj.weight"] = expert.chunk(2)
        elif name.endswith(".experts.down_proj"):
            for e, expert in enumerate(t):
                views[name.removesuffix("down_proj") + f"{e}.down_proj.weight"] = expert
        elif name.endswith(".gate_up_proj.weight"):
            at = name.removesuffix("gate_up_proj.weight")
            views[f"{at}gate_proj.weight"], views[f"{at}up_proj.weight"] = t.chunk(2)
        else:
            views[name] = t
    return views


def config_dict(config: ModelConfig, dtype: str, ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json. As in K2's own, max_position_embeddings is the context after YaRN and rope_scaling holds the one before."""
    fields = dataclasses.asdict(config)
    yarn = fields.pop("yarn")
    if yarn:
        original = config.max_position_embeddings
        fields["max_position_embeddings"] = round(original * yarn["factor"])
        yarn = {"type": "yarn", "rope_type": "yarn", "original_max_position_embeddings": original, **yarn}
    return {
        **fields,
        **FIXED,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "attention_dropout": 0.0,
        "rope_scaling": yarn,
        "dtype": dtype,
        "bos_token_id": ids.get("[BOS]"),
        "eos_token_id": ids.get("[EOS]"),
        "pad_token_id": ids.get("[PAD]"),
    }


def token_ids(folder: Path) -> dict[str, int]:
    """Special tokens of a tokenizer folder to their ids."""
    try:
        added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        return {token["content"]: token["id"] for token in added}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        at = folder / "tokenizer.json"
        raise K2Error(f"{at}: not a readable tokenizer ({_line(error)}); run the tokenizer stage again") from None


# -- reading -----------------------------------------------------------------------------------------------------------------------
@torch.no_grad()
def load(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Transformer, ModelConfig]:
    """Read a folder that `save` or transformers' save_pretrained wrote, of whatever dtype. Routers are float32 whatever `dtype` is.

    K2Error lists every tensor that is missing, unknown or of another shape.
    """
    folder = Path(folder)
    fields = _read_json(folder / "config.json")
    config = parse_config(fields, folder / "config.json")
    with torch.device("meta"):
        model = Transformer(config)
    router = ("mlp.gate.weight", "e_score_correction_bias")
    state = {
        name: torch.empty(t.shape, dtype=torch.float32 if name.endswith(router) else dtype, device=device)
        for name, t in model.state_dict().items()
    }
    views = hf_views(state)
    extra = range(config.num_hidden_layers, config.num_hidden_layers + (fields.get("num_nextn_predict_layers") or 0))
    unused = tuple(f"model.layers.{i}." for i in extra)
    found: dict[str, list[int]] = {}
    for path in _weight_files(folder):
        with _open(path) as file:
            for name in file.keys():
                shape = list(file.get_slice(name).get_shape())
                if name.startswith(unused) or 0 in shape:  # multi-token prediction or a shared expert of width 0: no place here
                    continue
                found[name] = shape
                if name in views and shape == list(views[name].shape):
                    views[name].copy_(_read_tensor(file, name, path))
    _check(found, {name: list(t.shape) for name, t in views.items()}, folder)
    model.load_state_dict(state, assign=True)
    model.inv_freq = rope.inverse_frequencies(config)  # the one tensor that is not in the state dict
    return model, config


def parse_config(fields: Mapping[str, Any], path: Path) -> ModelConfig:
    """config.json to ModelConfig. K2Error names each field that says something this architecture does not do."""
    if "DeepseekV3ForCausalLM" not in (fields.get("architectures") or []):
        raise K2Error(f"{path}: architectures is {fields.get('architectures')}; give a model of DeepseekV3ForCausalLM")
    if fields.get("quantization_config"):
        raise K2Error(f"{path}: quantised weights are not read; convert the checkpoint to bfloat16 and remove quantization_config")
    wrong = [f"{k} is {fields[k]!r}, this architecture has {v!r}" for k, v in FIXED.items() if k in fields and fields[k] != v]
    wrong += [f"{k} is missing" for k in ("n_group", "topk_group") if k not in fields]  # their defaults elsewhere are not 1
    known = {f.name for f in dataclasses.fields(ModelConfig)} - {"yarn", "rope_theta"}
    wrong += [f"{k} is missing" for k in sorted(known) if k not in fields]
    if wrong:
        raise K2Error(f"{path}: {'; '.join(wrong)}")
    scaling = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    values = {name: fields[name] for name in known}
    values["rope_theta"] = float(scaling.get("rope_theta") or fields.get("rope_theta") or 10_000)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "yarn") or scaling.get("attention_factor") or scaling.get("truncate") is False:
        raise K2Error(f"{path}: rope scaling {scaling} is not supported; only YaRN with K2's fields is")
    if kind == "yarn":
        if not scaling.get("original_max_position_embeddings"):
            raise K2Error(f"{path}: YaRN without original_max_position_embeddings; add the context before extension")
        values["max_position_embeddings"] = scaling["original_max_position_embeddings"]
        defaults = {"factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}
        values["yarn"] = YarnConfig(**{name: float(scaling.get(name) or default) for name, default in defaults.items()})
    try:
        return ModelConfig(**values)
    except (TypeError, ValueError) as error:
        raise K2Error(f"{path}: {error}") from None


def _check(found: dict[str, list[int]], expected: dict[str, list[int]], folder: Path) -> None:
    wrong = [f"{n} is missing" for n in expected if n not in found]
    wrong += [f"{n} is not a part of this architecture" for n in found if n not in expected]
    wrong += [f"{n} is {found[n]}, not {shape}" for n, shape in expected.items() if n in found and found[n] != shape]
    if wrong:
        shown = "; ".join(wrong[:20]) + (f"; and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise K2Error(f"{folder}: the weights do not fit config.json ({len(wrong)} tensors): {shown}")


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = sorted(set(_read_json(index).get("weight_map", {}).values())) if index.exists() else ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise K2Error(f"{folder / name}: missing; the model folder is incomplete, run the stage that makes it again")
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise K2Error(f"{path}: not a whole safetensors file ({_line(error)}); delete it and make it again") from None


def _read_tensor(file: Any, name: str, path: Path) -> Tensor:
    try:
        return file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise K2Error(f"{path}: {name} is not readable ({_line(error)}); delete the file and make it again") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise K2Error(f"{path}: missing; give a model folder in the Hugging Face format") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise K2Error(f"{path}: not readable JSON ({_line(error)})") from None
    if not isinstance(fields, dict):
        raise K2Error(f"{path}: expected a JSON object")
    return fields


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

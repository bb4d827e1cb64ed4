"""publish as dvc runs it: `python -m tasks.publish` on the real dvc.yaml, with a real MLflow registry."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from k2 import release, storage, track
from k2.config import ModelConfig, YarnConfig
from k2.errors import K2Error
from k2.model import hf
from k2.model.transformer import Transformer
from k2.tokenizer import ChatTokenizer, bpe

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(
    vocab_size=400, hidden_size=64, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=96, num_attention_heads=4,
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=8,
    num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32, routed_scaling_factor=1.41, rope_theta=50000.0,
    max_position_embeddings=64, rms_norm_eps=1e-6, initializer_range=0.1, yarn=YarnConfig(4.0, 1.0, 1.0, 1.0, 1.0),
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which models/rl and metrics/evaluate.json are there and nothing else is."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(ROOT / name, folder / name)
    (folder / "tokenizer").mkdir()
    text = ["the router sends a token to an expert, and What is 2+2? You are a helpful assistant."] * 50
    bpe.save(bpe.train(text, 400), folder / "tokenizer")
    hf.save(Transformer(CONFIG).initialize(0), CONFIG, folder / "models/rl", folder / "tokenizer")
    storage.seal(folder / "models/rl")
    (folder / "metrics").mkdir()
    scores = {"rl_pass_at_1": 0.5, "rl": {"pass_at_1": 0.5, "gym": {"number_sorting": {"reward": 0.75}}}, "sft": {"pass_at_1": 0.1}}
    (folder / "metrics/evaluate.json").write_text(json.dumps(scores))
    return folder


@pytest.fixture(scope="module")
def published(trained: Path) -> Path:
    env = os.environ | {"PYTHONPATH": str(ROOT), track.SWITCH: "on"}
    done = subprocess.run([sys.executable, "-m", "tasks.publish"], cwd=trained, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return trained


def test_transformers_opens_and_runs_the_release(published):
    """AutoModelForCausalLM gives the RL model's logits to 1e-4 in float32, generates with the defaults and stops at <|im_end|>;
    AutoTokenizer renders a dialogue to the tokens of training."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = storage.verify(published / "models/published")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "DeepseekV3ForCausalLM" and model.dtype == torch.float32
    chat = ChatTokenizer.load(folder)
    ids = tokenizer.apply_chat_template(release.DIALOGUE, add_generation_prompt=True, return_dict=False)
    assert ids == chat.encode_chat(release.DIALOGUE, add_generation_prompt=True)[0]
    ours, _ = hf.load(published / "models/rl")
    batch = torch.tensor([ids])
    with torch.no_grad():
        torch.testing.assert_close(model(batch).logits, ours(batch), atol=1e-4, rtol=0)
    defaults = model.generation_config
    assert (defaults.eos_token_id, defaults.temperature, defaults.do_sample) == (chat.im_end_id, 0.6, True)
    assert defaults.max_length == 256
    assert model.generate(batch, max_new_tokens=3).shape[1] <= len(ids) + 3


def test_the_card_and_the_metrics_say_what_it_is(published):
    """README.md has the shape, the RL model's scores and the code; metrics/publish.json begins with the measured difference."""
    card = (published / "models/published/README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "transformers"
    for part in ("256 tokens (YaRN, factor 4)", "8 routed, 2 for a token, 1 shared", "gym/number_sorting/reward | 0.75", "float32"):
        assert part in card, part
    assert "sft" not in card
    metrics = json.loads((published / "metrics/publish.json").read_text())
    assert list(metrics)[0] == "max_logit_difference" and 0 < metrics["max_logit_difference"] < 1e-4
    assert metrics["bytes"] == (published / "models/published/model.safetensors").stat().st_size


def test_the_registry_holds_the_reference(published):
    """The alias points at the new version, whose tags carry scores and the path; no weights went to MLflow."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{published / 'mlflow.db'}")
    params = yaml.safe_load((published / "params.yaml").read_text())["publish"]
    version = client.get_model_version_by_alias(params["registered_model"], params["alias"])
    assert int(version.version) == 1 == json.loads((published / "metrics/publish.json").read_text())["registry_version"]
    assert version.tags["path"] == "models/published" and float(version.tags["pass_at_1"]) == 0.5
    assert version.run_id and client.get_run(version.run_id).data.tags["stage"] == "publish"
    sizes = [p.stat().st_size for p in (published / "mlartifacts").rglob("*") if p.is_file()]
    assert sum(sizes) < 10_000


def test_a_model_that_transformers_computes_otherwise_is_refused(published, tmp_path):
    """A folder with one changed expert, with another rotary base, or that does not open, is not published."""
    from safetensors.torch import load_file, save_file

    model, _ = hf.load(published / "models/rl")
    assert release.logit_difference(model, published / "models/published") < 1e-4
    folder = tmp_path / "changed"
    shutil.copytree(published / "models/published", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.mlp.experts.5.up_proj.weight"] *= 1.05
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(K2Error, match="logits differ from ours"):
        release.logit_difference(model, folder)
    shutil.copyfile(published / "models/published/model.safetensors", folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    with pytest.raises(K2Error, match="logits differ from ours"):
        release.logit_difference(model, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(K2Error, match="transformers cannot open it"):
        release.logit_difference(model, folder)


def test_a_damaged_model_is_refused_in_one_line(trained, tmp_path):
    """A flipped byte in models/rl stops the stage with the file's name; nothing is published."""
    folder = tmp_path / "checkout"
    shutil.copytree(trained, folder, ignore=shutil.ignore_patterns("published", "mlflow.db", "publish.json"))
    path = folder / "models/rl/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "tasks.publish"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert "models/rl/model.safetensors: checksum differs" in done.stderr
    assert not (folder / "models/published").exists()

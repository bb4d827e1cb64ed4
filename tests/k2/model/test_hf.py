import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from k2.config import YarnConfig
from k2.errors import K2Error
from k2.model import load, save
from k2.model.rope import inverse_frequencies

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
YARN = YarnConfig(factor=4.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)
SHAPES = {
    "q_lora": {},
    "no_q_lora": {"q_lora_rank": None},
    "yarn": {"yarn": YARN},
    "yarn_ramp": {
        "yarn": YarnConfig(factor=8.0, beta_fast=32.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=0.3),
        "q_lora_rank": None,
    },
    "two_shared_top_3": {"n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 2, "v_head_dim": 32},
    "one_head": {"num_attention_heads": 1, "n_routed_experts": 2, "num_hidden_layers": 1, "first_k_dense_replace": 0},
    "coarse_epsilon": {"rms_norm_eps": 1e-3},  # the latents' norms keep 1e-6
}


def transformers_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [40, 200], ids=["below_original_length", "above"])
def test_transformers_gives_our_logits(shape, T, make_model, tokens, tmp_path):
    """AutoModelForCausalLM opens a saved folder and its logits are ours to 1e-4, below and above the context before YaRN."""
    model = make_model(**SHAPES[shape])
    save(model, model.config, tmp_path)
    theirs, batch = transformers_model(tmp_path), tokens(2, T)
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    with torch.no_grad():
        ours, logits = model(batch), theirs(batch).logits
    assert ours.std() > 0.3  # logits that differ enough for the comparison to mean something
    torch.testing.assert_close(ours, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", ["q_lora", "yarn_ramp", "two_shared_top_3"])
def test_a_transformers_checkpoint_loads(shape, make_config, tokens, tmp_path):
    """A random model that transformers made and saved loads with the same configuration and gives the same logits."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from k2.model.hf import config_dict

    config = make_config(**SHAPES[shape])
    fields = config_dict(config, "float32", {})
    for derived in ("architectures", "model_type", "dtype"):
        fields.pop(derived)
    torch.manual_seed(0)
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**fields))
    theirs.save_pretrained(tmp_path)
    ours, found = load(tmp_path)
    assert found == config
    batch = tokens(2, 100)
    with torch.no_grad():
        torch.testing.assert_close(ours(batch), theirs(batch).logits, atol=1e-4, rtol=0)


def test_save_and_load_change_nothing(make_model, tmp_path):
    """Every tensor comes back bit for bit, with the configuration; loading in bfloat16 leaves routers and biases in float32."""
    model = make_model(yarn=YARN)
    save(model, model.config, tmp_path)
    again, config = load(tmp_path)
    assert config == model.config and again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    torch.testing.assert_close(again.inv_freq, model.inv_freq, atol=0, rtol=0)
    half, _ = load(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: t.dtype for name, t in half.state_dict().items()}
    assert {n for n, d in dtypes.items() if d == torch.float32} == {n for n in dtypes if ".gate." in n}


def test_masters_are_what_is_written(make_model, tmp_path):
    """With masters given, a bfloat16 model is saved in float32 without a bit lost."""
    model = make_model()
    masters = {n: p.detach().clone() for n, p in model.named_parameters()}
    biases = [r.e_score_correction_bias.clone() for r in model.routers()]
    save(model.cast(torch.bfloat16), model.config, tmp_path, masters=masters)
    again, _ = load(tmp_path)
    assert all(torch.equal(p, masters[n]) for n, p in again.named_parameters())
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "model.safetensors").values())
    assert all(torch.equal(r.e_score_correction_bias, b) for r, b in zip(again.routers(), biases))  # no masters, never rounded


def test_config_carries_k2s_fields(make_model, tmp_path):
    """config.json says what other tools ask for: no groups, sigmoid scores, selection bias, no prediction layers, both lengths."""
    model = make_model(yarn=YARN)
    save(model, model.config, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    expected = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "rope_interleave": True, "rope_theta": 50000.0, "max_position_embeddings": 256, "num_key_value_heads": 4,
    }  # fmt: skip
    assert {k: found[k] for k in expected} == expected
    assert found["rope_scaling"]["original_max_position_embeddings"] == 64
    assert found["rope_scaling"]["type"] == "yarn" and found["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize(
    "yarn",
    [None, YarnConfig(32.0, 1.0, 1.0, 1.0, 1.0), YarnConfig(40.0, 32.0, 1.0, 1.0, 1.0), YarnConfig(4.0, 8.0, 2.0, 0.707, 1.0)],
)
def test_k2s_own_frequencies(yarn, make_config):
    """K2's rotary numbers (64 dimensions, base 50,000, 4K context, factor 32, both betas 1) and others: frequencies, softmax scale
    and rotary scale equal transformers' to 1e-6; K2's ramp is a hard split between the pairs 19 and 20."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    from k2.model.hf import config_dict
    from k2.model.rope import rotary_scale, softmax_scale

    config = make_config(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=50000.0, max_position_embeddings=4096, yarn=yarn)
    fields = config_dict(config, "float32", {})
    theirs = DeepseekV3Config(**{k: v for k, v in fields.items() if k not in ("architectures", "model_type", "dtype")})
    rotary = DeepseekV3RotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(config), rotary.inv_freq, atol=1e-6, rtol=1e-6)
    assert rotary_scale(config) == pytest.approx(rotary.attention_scaling, abs=1e-6)
    assert softmax_scale(config) == pytest.approx(DeepseekV3Attention(theirs, 0).scaling, abs=1e-6)
    if yarn is not None and yarn.factor == 32.0:
        plain = inverse_frequencies(make_config(qk_rope_head_dim=64, rope_theta=50000.0))
        ratio = plain / inverse_frequencies(config)
        torch.testing.assert_close(ratio, torch.tensor([1.0] * 20 + [32.0] * 12))
        assert softmax_scale(config) * 192**0.5 == pytest.approx(1.8133, abs=1e-4)


def test_every_mismatch_is_listed_at_once(make_model, tmp_path):
    """Missing, unknown and misshapen tensors are named together, with both shapes."""
    model = make_model()
    save(model, model.config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["model.layers.0.self_attn.rotary.phase"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(K2Error) as error:
        load(tmp_path)
    for part in (
        "3 tensors",
        "experts.3.up_proj.weight is missing",
        "rotary.phase is not a part",
        "model.norm.weight is [65], not [64]",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "give a model of DeepseekV3ForCausalLM"),
        ({"n_group": 8, "scoring_func": "softmax"}, "n_group is 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "only YaRN"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ],
)
def test_a_config_of_another_architecture_is_refused(change, message, make_model, tmp_path):
    """A config.json that asks for what this code does not compute fails by name, before any weight is read."""
    model = make_model()
    save(model, model.config, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(K2Error, match=message):
        load(tmp_path)


def test_a_truncated_or_missing_file_is_named(make_model, tmp_path):
    """Half of a weight file, no weight file, and a config.json that is not JSON each give one line with the path."""
    model = make_model()
    save(model, model.config, tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(K2Error, match="model.safetensors: not a whole safetensors file"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(K2Error, match="model.safetensors: missing"):
        load(tmp_path)
    config.write_text("{")
    with pytest.raises(K2Error, match="config.json: not readable JSON"):
        load(tmp_path)


def test_shards_and_prediction_layers(make_model, tokens, tmp_path):
    """A sharded folder loads by its index; weights of multi-token-prediction layers, as in DeepSeek-V3, are left aside."""
    model = make_model()
    save(model, model.config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    index = {"weight_map": {n: file for file, part in shards.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fields = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    again, _ = load(tmp_path)
    batch = tokens(1, 20)
    assert torch.equal(again(batch), model(batch))

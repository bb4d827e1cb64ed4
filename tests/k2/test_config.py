"""params.yaml: every key known, every type checked, every error a line with the key's path."""

import dataclasses
from pathlib import Path

import pytest

from k2 import presets
from k2.config import Params, load_params, parse_params
from k2.errors import ConfigError

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "params.yaml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sft:\n  tokens:", "sft:\n  tokenz:", "sft.tokenz: unknown key; did you mean `tokens`?"),
        ("\ncorpus:\n", "\ncorpse:\n", "corpse: unknown key; did you mean `corpus`?"),
        ("ns_steps: 5", "ns_steps: 2.5", "muonclip.ns_steps: expected int, got 2.5; Newton-Schulz"),
        ("ns_steps: 5", "ns_steps: true", "muonclip.ns_steps: expected int, got True"),
        ("ns_steps: 5", "ns_steps: null", "muonclip.ns_steps: expected int, got None"),
        ("nesterov: true", "nesterov: 1", "muonclip.nesterov: expected bool, got 1"),
        ("ns_steps: 5", "ns_steps: 0", "muonclip.ns_steps: 0 must be at least 1"),
        ("momentum: 0.95", "momentum: 1.5", "muonclip.momentum: 1.5 must be at most 1"),
        ("momentum: 0.95", "momentum: .nan", "muonclip.momentum: nan is not a finite number"),
        ("momentum: 0.95", "momentum: ${rl.tau}", "muonclip.momentum: interpolation would hide a dependency from dvc.yaml"),
        ("styles: [encyclopedia", "styles: [{a: b}", "rephrase.styles: expected list[str], got [{'a': 'b'}"),
        ("extend: {docs: ", "extend: {docs: x", "tokenize.phases: expected dict[str, dict[str, float]], got"),
        ("provider: local", "provider: cloud", "llm.provider: 'cloud' is not one of local, openai"),
        ("beta_fast: 1.0, ", "", "extend.yarn.beta_fast: missing; Rotations above which"),
        ("  optim: {", "  optim: 3 #{", "pretrain.optim: expected a section with keys, got 3"),
        ("num_experts_per_tok: ", "num_experts_per_tok: 100", "model.num_experts_per_tok: 100"),
        ("model:\n", "model: [\n", "not valid YAML"),
        ("ns_steps: 5", "ns_steps: 5\n  ns_steps: 6", "not valid YAML"),
    ],
)
def test_a_mistake_is_named_by_its_path(old: str, new: str, message: str):
    """Unknown keys with the nearest known one, wrong types, bounds, choices, missing keys, numbers that are none, broken YAML."""
    assert old in TEXT
    with pytest.raises(ConfigError) as error:
        parse_params(TEXT.replace(old, new, 1), "params.yaml")
    assert str(error.value).startswith("params.yaml: ") and message in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "hello", "- 1", "a: 1"])
def test_a_file_that_is_no_params_file_is_a_configuration_error(text: str):
    with pytest.raises(ConfigError, match=r"^p: "):
        parse_params(text, "p")


def test_a_missing_or_binary_file_is_a_configuration_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="params.yaml: not found; run from the project's root"):
        load_params(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="params.yaml: not readable"):
        load_params(tmp_path / "params.yaml")


def test_integers_serve_as_numbers_and_exponents_are_floats():
    """`lr: 1` and `lr: 1e-3`, which YAML 1.1 takes for a string, are what they look like."""
    for written, value in (("1", 1.0), ("1e-3", 1e-3), ("2.0e-3", 2e-3)):
        text = presets.override(TEXT, dict([presets.parse_override(f"pretrain.optim.lr={written}")]))
        assert parse_params(text, "p").pretrain.optim.lr == value


def test_params_cannot_be_changed_after_loading():
    """Stages share one object; nobody may write to it."""
    params = load_params(ROOT / "params.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.sft.tokens = 1  # type: ignore[misc]


def test_every_knob_says_what_it_does():
    """Each leaf of each section has a description."""

    def check(cls: type, at: str) -> None:
        for field in dataclasses.fields(cls):
            if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
                check(field.type, f"{at}.{field.name}")
            elif field.name != "yarn":
                assert field.metadata.get("doc"), f"{at}.{field.name}"

    check(Params, "params")


@pytest.mark.parametrize("name", presets.names())
def test_presets_are_overlays_of_known_keys(name: str):
    """A preset gives a valid configuration that differs, and keeps the comments of params.yaml."""
    text = presets.overlay(TEXT, name)
    assert parse_params(text, name) != parse_params(TEXT, "params.yaml")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in TEXT.splitlines() if line.startswith("#")
    ]


def test_an_override_changes_one_line():
    """Comments, order and spelling of everything else stay, so that a diff shows the knob alone."""
    text = presets.override(TEXT, {"rl.steps": 3, "model.q_lora_rank": None})
    changed = [(a, b) for a, b in zip(TEXT.splitlines(), text.splitlines(), strict=True) if a != b]
    assert [b.strip() for _, b in changed] == ["q_lora_rank: null", "steps: 3"]
    with pytest.raises(ConfigError, match="rl.step.s: no such key"):
        presets.override(TEXT, {"rl.step.s": 3})
    with pytest.raises(ConfigError, match="preset `x` is not known; there are: .*micro"):
        presets.overlay(TEXT, "x")

"""The order of stages is dvc.yaml's, nobody else's."""

from pathlib import Path

import pytest

from flows.dag import load_dag
from k2.errors import ConfigError

ROOT = Path(__file__).parents[2]
DIAMOND = """
stages:
  last: {cmd: x, deps: [b/out, c/out/part.txt], metrics: [m.json]}
  left: {cmd: x, deps: [a], outs: [b/out]}
  right: {cmd: x, deps: [a/file.txt], outs: [{c/out: {cache: false}}]}
  first: {cmd: x, deps: [code.py], outs: [a]}
  alone: {cmd: x, deps: [m.json], outs: [d]}
"""


def dag(tmp_path: Path, text: str = DIAMOND):
    (tmp_path / "dvc.yaml").write_text(text)
    return load_dag(tmp_path)


def test_order_puts_every_stage_behind_those_whose_outputs_it_reads(tmp_path: Path):
    """Outs, metrics, paths inside an out and outs with options all make an edge; code does not."""
    d = dag(tmp_path)
    assert d.upstream == {"first": set(), "left": {"first"}, "right": {"first"}, "last": {"left", "right"}, "alone": {"last"}}
    order = list(d.stages)
    assert all(order.index(parent) < order.index(name) for name, parents in d.upstream.items() for parent in parents)


def test_selection_takes_what_lies_between(tmp_path: Path):
    """--from takes what follows, --to what is needed, both what lies between, --stage itself alone."""
    d = dag(tmp_path)
    assert set(d.select()) == {"first", "left", "right", "last", "alone"}
    assert d.select(start="left") == ["left", "last", "alone"]
    assert d.select(end="left") == ["first", "left"]
    assert d.select(start="left", end="last") == ["left", "last"]
    assert d.select(only="right") == ["right"]
    with pytest.raises(ConfigError, match="no stage lies between `left` and `right`"):
        d.select(start="left", end="right")
    with pytest.raises(ConfigError, match="stage `lefft` is not in dvc.yaml; did you mean `left`"):
        d.select(end="lefft")


def test_a_circle_is_named(tmp_path: Path):
    """Stages that need each other are a configuration error that names them."""
    with pytest.raises(ConfigError, match="circle: (a -> b -> a|b -> a -> b)"):
        dag(tmp_path, "stages: {a: {cmd: x, deps: [q], outs: [p]}, b: {cmd: x, deps: [p], outs: [q]}}")


def test_the_recipe_has_the_order_of_the_report():
    """Pre-training, annealing, extension, SFT, RL, evaluation, publication, each reading the one before."""
    d = load_dag(ROOT)
    chain = ["corpus", "tokenizer", "tokenize", "pretrain", "anneal", "extend", "sft", "curate", "rl", "evaluate", "publish"]
    for one, other in zip(chain, chain[1:]):
        assert one in d.ancestors(other)
    assert "pretrain" not in d.ancestors("trajectories")  # the agentic branch is independent of pre-training

"""The report: one page from whatever files there are, self-contained, the same for the same files."""

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from k2 import report
from k2.report import dag, figures
from k2.report.records import Records, present

STAGES = """
stages:
  tokenize: {cmd: c, outs: [data/tokens]}
  pretrain: {cmd: c, deps: [data/tokens], outs: [models/pretrain], plots: [plots/pretrain.csv: {x: step}]}
  sft: {cmd: c, deps: [models/pretrain, data/tokens], outs: [models/sft]}
  rl: {cmd: c, deps: [models/sft], outs: [models/rl]}
"""


def write_csv(path: Path, rows: list[dict]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(exist_ok=True, parents=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run up to RL, with the columns that the stages write."""
    (tmp_path / "dvc.yaml").write_text(STAGES)
    (tmp_path / "params.yaml").write_text("muonclip: {qk_clip_tau: 100.0}\nrl: {steps: 3}\n")
    for stage, loss in (("pretrain", 8.0), ("sft", 2.0)):
        rows = []
        for step in range(1, 31):
            row = {
                "step": step,
                "data/tokens": step * 1000,
                "train/loss": loss / step,
                "optim/lr": 1e-3,
                "attn/clipped_heads": step % 3,
            }
            row |= {f"attn/max_logit_layer_{i}": 50 + i + step for i in range(3)} | {"moe/max_violation_layer_1": 0.5}
            rows.append(row | ({"validation/bits_per_byte": loss / step} if step % 10 == 0 else {}))
        write_csv(tmp_path / "plots" / f"{stage}.csv", rows)
    rl = [{"step": 0, "rl/held_out": 41.0, "rl/held_out_sums": 41.0}]
    rl += [{"step": i, "rl/reward": 0.5, "rl/reward_sums": 0.5} for i in (1, 2)]
    rl += [{"step": 3, "rl/reward": 0.6, "rl/reward_sums": 0.6, "rl/held_out": 63.0, "rl/held_out_sums": 63.0}]
    write_csv(tmp_path / "plots" / "rl.csv", rl)
    cell = {"accuracy": 0.75, "nll": 0.5, "accuracy_no_yarn": 0.0, "nll_no_yarn": 3.25, "accuracy_before": 0.0, "nll_before": 3.5}
    write_csv(tmp_path / "plots" / "needle.csv", [{"length": n, "depth": d, **cell} for n in (64, 128) for d in (0.1, 0.9)])
    domain = {"pass_at_1": 0.4, "pass_at_k": 0.7, "reward": 0.5, "over_budget": 0.0, "episodes": 8}
    metrics = {"sft": {"bits_per_byte": 2.0, "pass_at_1": 0.4, "gym": {"sums": domain}}}
    metrics["rl"] = {"bits_per_byte": 2.1, "pass_at_1": 0.625, "gym": {"sums": domain | {"pass_at_1": 0.625}}}
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(metrics))
    (tmp_path / "data/evaluation").mkdir(parents=True)
    said = {"stage": "rl", "kind": "text", "prompt": "a < b", "text": "</script><b>& so ``` on"}
    (tmp_path / "data/evaluation/samples.jsonl").write_text(json.dumps(said) + "\n")
    return tmp_path


def test_the_page_has_every_figure_and_number(run):
    """All figures are drawn, and headline, table cells and parameters are the files' own values."""
    page = report.write(run).read_text()
    assert re.findall(r'<figure id="(\w+)"', page) == ["dag", "training", "attention", "experts", "needle", "reward", "gym"]
    for text in ("tau = 100", ">62 %<", ">40 %<", "0.50", "75%", "3.25", ">63<", ">41<", "muonclip.qk_clip_tau", "heads clipped"):
        assert text in page, text


def test_the_page_is_self_contained_and_safe(run):
    """Nothing is loaded from elsewhere, ids are unique, links inside resolve, and what a model said is text."""
    page = report.write(run).read_text()
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(#([^)]+)\)", page)) | set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)
    assert "<script" not in page and "&lt;/script&gt;&lt;b&gt;&amp; so" in page


def test_figures_follow_the_page_in_the_dark(run):
    """No fixed ink: lines and text take the page's colours; each figure file is well-formed SVG with the palette inside."""
    page = report.write(run).read_text()
    assert "prefers-color-scheme: dark" in page and "var(--pretrain)" in page and "var(--ink)" in page
    svg = page[page.index("<svg") : page.rindex("</svg>")]
    assert not re.findall(r"(?:stroke|fill): (?:black|#000000)(?!; stroke-opacity: 0)", svg)
    files = list((run / "report/figures").glob("*.svg"))
    assert len(files) == 7
    for file in files:
        assert "--pretrain:" in ElementTree.parse(file).getroot().find("{http://www.w3.org/2000/svg}style").text  # type: ignore[union-attr]


def test_markdown_says_the_same(run):
    """The Markdown page has the figures as files that exist, the same table, and a fence that no sample can close."""
    report.write(run)
    text = (run / "report/index.md").read_text()
    for name in re.findall(r"!\[\w+\]\((.*?)\)", text):
        assert (run / "report" / name).exists()
    assert "| rl | 2.100 |" in text and "62 %" in text
    assert text.count("```") % 2 == 0 and "~~~ on" in text


@pytest.mark.parametrize("files", [[], ["dvc.yaml", "params.yaml"]])
def test_what_has_not_run_is_said(tmp_path, run, files):
    """An empty folder and one with nothing run both give a page that says so."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in files:
        (empty / name).write_text((run / name).read_text())
    page = report.write(empty).read_text()
    assert page.count("not run yet") >= 5 and ("stroke-dasharray" in page) == bool(files)


def test_the_same_files_give_the_same_page(run):
    """Byte for byte: the report can be compared and cached."""
    first = report.write(run).read_bytes()
    assert report.write(run).read_bytes() == first


def test_the_dag_is_that_of_dvc_yaml(run):
    """Edges are read from deps and outs, a link that a longer way implies is faint, and stages stand left of what needs them."""
    stages = Records(run).stages
    links = dag.edges(stages)
    assert set(links) == {("tokenize", "pretrain"), ("tokenize", "sft"), ("pretrain", "sft"), ("sft", "rl")}
    assert dag.direct(links) == set(links) - {("tokenize", "sft")}
    place = dag.layout(stages, links)
    assert all(place[a][0] < place[b][0] for a, b in links) and len(set(place.values())) == len(place)


def test_phases_follow_each_other_on_one_axis(run):
    """A phase begins where the tokens of the one before end; one that has not run takes no room; empty cells are no points."""
    records = Records(run)
    assert figures.offsets(records) == {"pretrain": 0.0, "sft": 30000.0}
    x, y = present(records.curve("sft"), "data/tokens", "validation/bits_per_byte")
    assert x.tolist() == [10000, 20000, 30000] and y[0] == pytest.approx(0.2)

"""What stands on the page, as blocks in reading order; render.py turns them into HTML and Markdown."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from k2.report import dag, figures
from k2.report.records import MODELS, Records
from k2.report.style import COLOURS, FONT, styled


@dataclass
class Heading:
    text: str


@dataclass
class Text:
    text: str
    code: bool = False


@dataclass
class Tiles:
    """Headline figures: (label, value, remark)."""

    tiles: list[tuple[str, str, str]]


@dataclass
class Figure:
    name: str
    svg: str | None
    caption: str

    def svg_file(self) -> str:
        """The figure as a file of its own, with the palette inside."""
        light = " ".join(f"--{name}: {value};" for name, (value, _) in COLOURS.items())
        dark = " ".join(f"--{name}: {value};" for name, (_, value) in COLOURS.items())
        dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
        style = f"<style>svg {{ {light} }} {dark} text {{ font-family: {FONT} }}</style>"
        assert self.svg is not None
        head, rest = self.svg.split(">", 1)
        return f"{head}>{style}{rest}"


@dataclass
class Table:
    columns: list[str]
    rows: list[list[str]]
    folded: str = ""  # title of a fold that hides the table at first


@dataclass
class Sample:
    stage: str
    turns: list[tuple[str, str]]  # (who, what)
    note: str = ""


@dataclass
class Page:
    title: str
    subtitle: str
    blocks: list[Any] = field(default_factory=list)

    def figures(self) -> Iterator[Figure]:
        return (block for block in self.blocks if isinstance(block, Figure) and block.svg)


def build(records: Records) -> Page:
    """The whole page."""
    with styled():
        return _build(records)


def _build(records: Records) -> Page:
    ran = [stage for stage in records.stages if records.done(stage)]
    commit = records.commit()
    subtitle = f"{len(ran)} of {len(records.stages)} stages run" + (f" · commit {commit}" if commit else "")
    page = Page("Kimi-K2's recipe, one run", subtitle)
    add = page.blocks.append
    add(Tiles(list(tiles(records))))
    done = {stage: records.done(stage) for stage in records.stages}
    add(Figure("dag", dag.draw(records.stages, done) if records.stages else None,
               "The stages of dvc.yaml. Grey: data; colours: models, as in all figures below. Dashed: not run yet. "
               "Faint lines: needed as well."))  # fmt: skip
    add(Heading("Training"))
    add(Figure("training", figures.training(records),
               "Loss (faint: each step), bits per byte of the validation split, and learning rate. Each phase has its own data, so "
               "the loss may jump between phases; SFT's is over assistant tokens alone."))  # fmt: skip
    add(Figure("attention", figures.attention(records),
               "The largest attention logit of each layer (first layer faintest) and, below, how many heads QK-Clip rescaled. "
               "Above tau a head's query and key weights shrink."))  # fmt: skip
    add(Figure("experts", figures.experts(records),
               "Balance of the routed experts: 0 is even. Each line is a MoE layer (first faintest); the map shows the tokens that "
               "each expert gets on the validation text."))  # fmt: skip
    add(Heading("Long context"))
    add(Figure("needle", figures.needle(records),
               "A word hidden in a text and asked for at its end. Upper figure and colour: nats per answer token, less is "
               "better; lower figure: share of answers right."))  # fmt: skip
    add(Heading("Reinforcement learning"))
    add(
        Figure(
            "reward",
            figures.reward(records),
            "Mean reward of the policy's own samples, smoothed. Held-out prompts are never trained on; temperature 1.",
        )
    )
    add(Figure("gym", figures.gym(records), "Held-out gym tasks before and after RL, at the evaluation's temperature."))
    add(Heading("Evaluation"))
    add(evaluation_table(records))
    add(latency_table(records))
    add(Heading("What the models say"))
    page.blocks += list(samples(records)) or [Text("Not run yet.")]
    add(Heading("How to reproduce"))
    add(Text((f"git checkout {commit.split()[0]}\n" if commit else "") + "make run        # or: dvc repro", code=True))
    add(Table(["parameter", "value"], [[k, v] for k, v in flatten(records.params)], folded="All parameters of params.yaml"))
    page.blocks = [block for block in page.blocks if block is not None]
    return page


def tiles(records: Records) -> Iterator[tuple[str, str, str]]:
    """The run in a few figures."""
    evaluated = records.metrics("evaluate")
    tokens = sum(records.metrics(stage).get("tokens", 0) for stage in MODELS[:-1])
    yield "tokens trained on", figures.si(tokens) if tokens else "–", "pretrain to SFT"
    bits = [(stage, evaluated[stage]["bits_per_byte"]) for stage in ("pretrain", "anneal", "extend") if stage in evaluated]
    yield "bits per byte", f"{bits[-1][1]:.3f}" if bits else "–", f"after {bits[-1][0]}" if bits else "not run yet"
    sft, rl = (evaluated.get(stage, {}).get("pass_at_1") for stage in ("sft", "rl"))
    yield "pass@1 after RL", percent(rl), f"{percent(sft)} after SFT" if sft is not None else "not run yet"
    with_, without = (evaluated.get("extend", {}).get(f"needle_{key}") for key in ("nll", "nll_no_yarn"))
    yield "needle", number(with_), f"nats a token; {number(without)} without YaRN" if without is not None else "not run yet"
    clipped = [records.metrics(stage)["max_logit"] for stage in MODELS if "max_logit" in records.metrics(stage)]
    tau = records.params.get("muonclip", {}).get("qk_clip_tau")
    yield "largest logit", f"{max(clipped):.1f}" if clipped else "–", f"tau {tau:g}" if tau else "no clip"


def evaluation_table(records: Records) -> Table | Text:
    """A row a model, a column a measure."""
    metrics = records.metrics("evaluate")
    if not metrics:
        return Text("Not run yet.")
    domains = list(dict.fromkeys(d for stage in MODELS for d in metrics.get(stage, {}).get("gym", {})))
    head = [
        "model",
        "bits per byte",
        "needle exact",
        "pass@1",
        "pass@k",
        *(d.replace("_", " ") for d in domains),
        "tool calls exact",
    ]
    rows = []
    for stage in MODELS:
        m = metrics.get(stage, {})
        played = m.get("gym", {})
        rows.append([
            stage, number(m.get("bits_per_byte"), 3), percent(m.get("needle_accuracy")),
            percent(m.get("pass_at_1")), percent(m.get("pass_at_k")),
            *(percent(played.get(d, {}).get("pass_at_1")) for d in domains), percent(m.get("tool_calls", {}).get("exact")),
        ])  # fmt: skip
    return Table(head, rows)


def latency_table(records: Records) -> Table | None:
    """Milliseconds by percentile."""
    measured = records.metrics("evaluate").get("rl", {}).get("latency")
    if not measured:
        return None
    rows = [
        [label, *(number(measured.get(f"{key}_p{p}"), 1) for p in (50, 90, 99))]
        for label, key in (("first token, ms", "first_token_ms"), ("each further token, ms", "token_ms"))
    ]
    rows.append(["a batch, tokens per second", figures.si(measured["batch_tokens_per_second"]), "", ""])
    return Table(["generation, RL model", "p50", "p90", "p99"], rows)


def samples(records: Records) -> Iterator[Sample]:
    """The recorded samples, stage by stage."""
    for sample in records.evaluation("samples.jsonl"):
        if sample.get("kind") == "text":
            yield Sample(sample["stage"], [("prompt", sample["prompt"]), ("model", sample["text"])])
        else:
            turns = []
            for message in sample["messages"]:
                calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls") or []]
                turns.append((message["role"], "\n".join(filter(None, [message.get("content") or "", *calls]))))
            yield Sample(sample["stage"], turns, f"{sample['domain'].replace('_', ' ')} · reward {sample['reward']:g}")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def flatten(node: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested sections as (dotted key, value)."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from flatten(value, f"{at}.{key}" if at else str(key))
    else:
        yield at, "null" if node is None else str(node)

"""Colours and type of the report: one colour a stage, the same in every figure, on a light or a dark page.

Figures are drawn with the light colours and then each colour is replaced by a CSS variable, so that the page decides.
"""

import io
import re
from contextlib import AbstractContextManager
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# name: (light, dark)
COLOURS = {
    "ink": ("#1f2430", "#e6e8ee"),
    "muted": ("#6b7283", "#98a0b3"),
    "grid": ("#e3e6ec", "#2c3240"),
    "paper": ("#fefefd", "#14171f"),
    "panel": ("#f5f6f8", "#1b1f2a"),
    "data": ("#7c869b", "#8e99b0"),
    "pretrain": ("#2f6fde", "#6ea0ff"),
    "anneal": ("#1a9aa8", "#4cc6d3"),
    "extend": ("#3c9a4f", "#6fcb81"),
    "sft": ("#d8861b", "#f2ab4d"),
    "rl": ("#d2434f", "#f4777f"),
    "evaluate": ("#8256c8", "#b08df0"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
STAGE_COLOUR = {name: name for name in ("pretrain", "anneal", "extend", "sft", "rl", "evaluate")} | {"publish": "evaluate"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
RAMP = ["#eef3fd", "#bcd2f8", "#7ba7f0", "#2f6fde", "#173f8c"]  # light to dark, for maps: low to high

RC: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "k2flow",  # the same figure gives the same file
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["muted"],
    "axes.edgecolor": LIGHT["muted"],
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": LIGHT["ink"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "xtick.major.width": 0.6,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


def styled() -> AbstractContextManager:
    """A context in which matplotlib draws in the report's style."""
    return plt.rc_context(RC)


def canvas(width: float, height: float, **subplots: Any) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches, with its axes."""
    return plt.subplots(figsize=(width, height), layout="constrained", **subplots)


def to_svg(figure: Figure) -> str:
    """The figure as an <svg> element whose colours are the page's CSS variables."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return themed(text.getvalue()[text.getvalue().index("<svg") :])


def themed(svg: str) -> str:
    """Replace the palette's light colours by CSS variables, and matplotlib's font by the page's."""
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font:\s*([^;\"]*?)'DejaVu Sans'[^;\"]*", rf"font: \1{FONT.replace(chr(39), '')}", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)


def variables() -> str:
    """CSS: the palette for light pages and prints, and for dark ones."""
    light = " ".join(f"--{name}: {value};" for name, (value, _) in COLOURS.items())
    dark = " ".join(f"--{name}: {value};" for name, (_, value) in COLOURS.items())
    return f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"

"""The report's figures, each from curves on disk to an <svg>; None when nothing of it has run."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from k2.report.records import MODELS, TRAINING, Records, layers, present
from k2.report.style import LIGHT, RAMP, canvas, to_svg

X = "data/tokens"
WIDTH = 10.0  # inches, the page's column
RAMP_MAP = LinearSegmentedColormap.from_list("ramp", RAMP)


# -- the phases on one axis -------------------------------------------------------------------------------------------------------
def offsets(records: Records) -> dict[str, float]:
    """Tokens seen before each training phase that has run."""
    starts, total = {}, 0.0
    for stage in TRAINING:
        x, _ = present(records.curve(stage), X, "train/loss")
        if len(x):
            starts[stage], total = total, total + x[-1]
    return starts


def lines(records: Records, axes: Axes, column: str, smooth: bool = False, **style: Any) -> bool:
    """A column of every phase, each in its colour, on the joint token axis. Returns whether there was any."""
    drawn = False
    for stage, start in offsets(records).items():
        x, y = present(records.curve(stage), X, column)
        if not len(x):
            continue
        drawn = True
        if smooth and len(y) > 20:
            axes.plot(start + x, y, color=LIGHT[stage], alpha=0.25, linewidth=1)
            y = smoothed(y)
        axes.plot(start + x, y, color=LIGHT[stage], **style)
    return drawn


def smoothed(values: np.ndarray, decay: float = 0.75) -> np.ndarray:
    """Mean over neighbours with weights that fall exponentially to both sides: no lag."""
    distance = np.abs(np.arange(len(values))[:, None] - np.arange(len(values))[None])
    weights = decay**distance
    return weights @ values / weights.sum(axis=1)


def boundaries(records: Records, axes: Sequence[Axes], narrow: bool = False) -> None:
    """Thin lines where a phase begins, its name on top of the first axes (of two heights where it is narrow)."""
    starts = offsets(records)
    for stage, start in starts.items():
        for ax in axes:
            if start:
                ax.axvline(start, color=LIGHT["muted"], linewidth=0.6, linestyle=(0, (2, 3)))
        crowded = narrow and list(starts).index(stage) % 2
        axes[0].annotate(stage, (start, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 14 if crowded else 4),
                         textcoords="offset points", color=LIGHT[stage], fontweight="bold", fontsize=9)  # fmt: skip
    for ax in axes:
        ax.set_xlim(left=0)
        ax.margins(x=0.01)
    axes[-1].set_xlabel("tokens, all phases")
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda v, _: si(v)))


def si(value: float) -> str:
    """1200000 -> 1.2M."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def training(records: Records) -> str | None:
    """Loss, bits per byte and learning rate over all phases."""
    if not offsets(records):
        return None
    figure, axes = canvas(WIDTH, 6.4, nrows=3, sharex=True, height_ratios=[3, 3, 1.3])
    lines(records, axes[0], "train/loss", smooth=True)
    axes[0].set_ylabel("training loss\nnats per token")
    lines(records, axes[1], "validation/bits_per_byte", marker="o", markersize=4.5, markeredgecolor="none")
    axes[1].set_ylabel("validation\nbits per byte")
    lines(records, axes[2], "optim/lr")
    axes[2].set_ylabel("learning rate\nthousandths")
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_locator(MaxNLocator(4))
    axes[2].yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{1000 * v:g}"))
    boundaries(records, axes)
    figure.align_ylabels()
    return to_svg(figure)


def attention(records: Records) -> str | None:
    """Largest attention logit of each layer with the clip threshold, and the heads that were clipped."""
    starts = offsets(records)
    names = layers(records.curve(next(iter(starts))), "attn/max_logit_layer_") if starts else []
    if not names:
        return None
    figure, axes = canvas(WIDTH, 4.4, nrows=2, sharex=True, height_ratios=[3, 1])
    shade = np.linspace(0.35, 1.0, len(names))
    for (_, column), strength in zip(names, shade):
        for stage, start in starts.items():
            x, y = present(records.curve(stage), X, column)
            axes[0].plot(start + x, y, color=LIGHT[stage], alpha=strength, linewidth=1.3)
    for layer, column in names[:: max(1, len(names) - 1)]:
        stage = list(starts)[-1]
        x, y = present(records.curve(stage), X, column)
        if len(x):
            axes[0].annotate(f"layer {layer}", (starts[stage] + x[-1], y[-1]), xytext=(5, 0), textcoords="offset points",
                             va="center", color=LIGHT["muted"], fontsize=8, annotation_clip=False)  # fmt: skip
    tau = records.params.get("muonclip", {}).get("qk_clip_tau")
    if tau:
        axes[0].axhline(tau, color=LIGHT["rl"], linewidth=1.2, linestyle=(0, (5, 3)))
        axes[0].annotate(f"tau = {tau:g}", (0, tau), xycoords=("axes fraction", "data"), xytext=(4, 4), textcoords="offset points",
                         color=LIGHT["rl"], fontsize=8.5)  # fmt: skip
    axes[0].set_ylabel("max attention logit")
    axes[0].set_ylim(bottom=0)
    for stage, start in starts.items():
        x, y = present(records.curve(stage), X, "attn/clipped_heads")
        axes[1].fill_between(start + x, y, step="mid", color=LIGHT[stage], linewidth=0, alpha=0.8)
    axes[1].set_ylabel("heads clipped\nper step")
    axes[1].set_ylim(0, max(1.0, axes[1].get_ylim()[1]))
    axes[1].yaxis.set_major_locator(MaxNLocator(3, integer=True))
    boundaries(records, axes)
    figure.align_ylabels()
    return to_svg(figure)


def experts(records: Records) -> str | None:
    """Largest violation of balance of each MoE layer, and the load of every expert on the validation text."""
    starts = offsets(records)
    names = layers(records.curve(next(iter(starts))), "moe/max_violation_layer_") if starts else []
    loads = {row["stage"]: np.array(row["load"]) for row in records.evaluation("expert_load.jsonl")}
    if not names:
        return None
    figure, axes = canvas(WIDTH, 3.2, ncols=2 if loads else 1, squeeze=False, width_ratios=[1.15, 1] if loads else None)
    ax = axes[0, 0]
    for (_, column), strength in zip(names, np.linspace(0.35, 1.0, len(names))):
        for stage, start in starts.items():
            x, y = present(records.curve(stage), X, column)
            ax.plot(start + x, smoothed(y), color=LIGHT[stage], alpha=strength, linewidth=1.3)
    ax.set_ylabel("max violation of balance\n(busiest expert / mean - 1)")
    ax.set_ylim(bottom=0)
    boundaries(records, [ax], narrow=True)
    if loads:
        stage = next(name for name in ("extend", *reversed(MODELS)) if name in loads)
        load = loads[stage] / loads[stage].mean(axis=1, keepdims=True)  # (layers, experts), 1 is even
        ax = axes[0, 1]
        heat(figure, ax, load, "load / mean", vmin=0.0, vmax=max(2.0, float(load.max())))
        ax.set_title(f"after {stage}", color=LIGHT["muted"], fontweight="normal")
        ax.set_yticks(range(len(load)), [f"layer {layer}" for layer, _ in names[: len(load)]])
        ax.set_xlabel(f"the {load.shape[1]} routed experts")
    return to_svg(figure)


# -- reinforcement learning -------------------------------------------------------------------------------------------------------
def reward(records: Records) -> str | None:
    """Reward in training by domain, and on held-out tasks."""
    curve = records.curve("rl")
    x, y = present(curve, "step", "rl/reward")
    if not len(x):
        return None
    domains = [column for column in curve if column.startswith("rl/reward_")]
    figure, axes = canvas(WIDTH, 3.4, ncols=2, sharey=True)
    for column in domains:
        xd, yd = present(curve, "step", column)
        axes[0].plot(xd, 100 * smoothed(yd), color=LIGHT["muted"], linewidth=1, alpha=0.8)
    ends = [(100 * smoothed(present(curve, "step", c)[1])[-1], c) for c in domains if len(present(curve, "step", c)[0])]
    label_ends(axes[0], x[-1], [(value, column.removeprefix("rl/reward_")) for value, column in ends])
    axes[0].plot(x, 100 * y, color=LIGHT["rl"], alpha=0.3, linewidth=1)
    axes[0].plot(x, 100 * smoothed(y), color=LIGHT["rl"], linewidth=2.4)
    axes[0].set_title("training prompts: mean and each domain")
    axes[0].set_ylabel("mean reward, of 100")
    held = [column for column in curve if column.startswith("rl/held_out_")]
    for column in held:
        axes[1].plot(*present(curve, "step", column), color=LIGHT["muted"], linewidth=1, alpha=0.8)
    tails = [(present(curve, "step", c)[1][-1], c.removeprefix("rl/held_out_")) for c in held if len(present(curve, "step", c)[0])]
    xh, yh = present(curve, "step", "rl/held_out")
    if len(xh):
        label_ends(axes[1], xh[-1], tails)
        axes[1].plot(xh, yh, color=LIGHT["rl"], linewidth=2.4, marker="o", markersize=5, markeredgecolor="none")
        for at, ha in ((0, "left"), (-1, "right")):
            axes[1].annotate(f"{yh[at]:.0f}", (xh[at], yh[at]), xytext=(0, 7), textcoords="offset points", ha=ha,
                             color=LIGHT["rl"], fontweight="bold")  # fmt: skip
    axes[1].set_title("held-out prompts")
    for ax in axes:
        ax.set_xlabel("RL step")
        ax.set_ylim(0, 104)
    return to_svg(figure)


def label_ends(axes: Axes, x: float, ends: list[tuple[float, str]]) -> None:
    """Names at the right end of lines, pushed apart so that none covers another."""
    low = -np.inf
    for value, name in sorted(ends):
        low = max(value, low + 6)
        axes.annotate(name, (x, low), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=LIGHT["muted"],
                      annotation_clip=False)  # fmt: skip


def gym(records: Records) -> str | None:
    """pass@1 and pass@k of the SFT and the RL model on each domain's held-out tasks."""
    metrics = records.metrics("evaluate")
    results = {stage: metrics[stage]["gym"] for stage in ("sft", "rl") if "gym" in metrics.get(stage, {})}
    if not results:
        return None
    domains = list(next(iter(results.values())))
    figure, ax = canvas(WIDTH, 0.9 + 0.55 * len(domains))
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", visible=True)
    for row, domain in enumerate(reversed(domains)):
        values = {stage: result[domain] for stage, result in results.items() if domain in result}
        for stage, shift in (("sft", 0.13), ("rl", -0.13)):
            if stage in values:
                one, k = values[stage]["pass_at_1"], values[stage]["pass_at_k"]
                ax.plot([one, k], [row + shift] * 2, color=LIGHT[stage], linewidth=1.6, alpha=0.5)
                ax.plot(
                    one,
                    row + shift,
                    "o",
                    color=LIGHT[stage],
                    markersize=8,
                    markeredgecolor="none",
                    label=stage if not row else None,
                )
                ax.plot(k, row + shift, "|", color=LIGHT[stage], markersize=9, markeredgewidth=1.8)
    ax.set_yticks(range(len(domains)), [domain.replace("_", " ") for domain in reversed(domains)], color=LIGHT["ink"])
    ax.set_ylim(-0.6, len(domains) - 0.4)
    ax.set_xlim(-0.01, 1.01)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_xlabel("dot: pass@1, bar: pass@k")
    ax.legend(loc="lower right", ncols=2, bbox_to_anchor=(1.0, 1.0), borderaxespad=0)
    return to_svg(figure)


# -- long context -----------------------------------------------------------------------------------------------------------------
def needle(records: Records) -> str | None:
    """Retrieval by length and depth, before and after extension: nats per answer token (also the colour), below the exact share."""
    curve = records.curve("needle")
    if not curve:
        return None
    lengths, depths = sorted(set(curve["length"])), sorted(set(curve["depth"]))
    panels = {"_before": "before extension", "_no_yarn": "extended, YaRN switched off", "": "extended, with YaRN"}
    figure, axes = canvas(WIDTH, 1.3 + 0.5 * len(depths), ncols=len(panels), sharey=True)
    top = max(1e-6, *(np.nanmax(curve[f"nll{key}"]) for key in panels))
    for ax, (key, title) in zip(axes, panels.items(), strict=True):
        grid = np.full((2, len(depths), len(lengths)), np.nan)
        for length, depth, nll, accuracy in zip(curve["length"], curve["depth"], curve[f"nll{key}"], curve[f"accuracy{key}"]):
            grid[:, depths.index(depth), lengths.index(length)] = nll, accuracy
        heat(figure, ax, grid[0], "nats per answer token" if ax is axes[-1] else None, vmin=0, vmax=float(top))
        for (row, column), nll in np.ndenumerate(grid[0]):
            ax.text(column, row, f"{nll:.2f}\n{grid[1, row, column]:.0%}", ha="center", va="center", fontsize=8, linespacing=1.3,
                    color="white" if nll > 0.55 * top else "#1b2b4a")  # fmt: skip
        ax.set_title(title)
        ax.set_xticks(range(len(lengths)), [f"{length:g}" for length in lengths])
        ax.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        ax.set_xlabel("context in tokens")
    axes[0].set_ylabel("depth of the needle")
    return to_svg(figure)


def heat(figure: Any, ax: Axes, values: np.ndarray, label: str | None, vmin: float, vmax: float) -> None:
    """A map with a colour bar; drawn as cells of the SVG, not as a picture in it."""
    ax.grid(visible=False)
    mesh = ax.pcolormesh(
        np.arange(values.shape[1] + 1) - 0.5,
        np.arange(values.shape[0] + 1) - 0.5,
        values,
        cmap=RAMP_MAP,
        vmin=vmin,
        vmax=vmax,
        edgecolors=LIGHT["paper"],
        linewidth=1.5,
    )
    ax.set_xlim(-0.5, values.shape[1] - 0.5)
    ax.set_ylim(values.shape[0] - 0.5, -0.5)
    for spine in ax.spines.values():
        spine.set_visible(False)
    if label:
        bar = figure.colorbar(mesh, ax=ax, pad=0.02, fraction=0.05, aspect=14)
        bar.outline.set_visible(False)
        bar.set_label(label)
        bar.ax.tick_params(size=0)

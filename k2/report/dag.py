"""The DAG of dvc.yaml as SVG: a small layered layout, inputs on the left."""

from collections.abc import Mapping
from typing import Any

from k2.report.style import FONT, STAGE_COLOUR

BOX_W, BOX_H, GAP_X, GAP_Y = 86, 34, 17, 20


def edges(stages: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(from, to) wherever a stage depends on what another makes."""
    maker = {path: name for name, entry in stages.items() for kind in ("outs", "metrics", "plots") for path in _paths(entry, kind)}
    found = [(maker[path], name) for name, entry in stages.items() for path in _paths(entry, "deps") if path in maker]
    return list(dict.fromkeys(found))


def direct(links: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """The links that no longer way replaces (transitive reduction): the others are drawn faintly."""
    after: dict[str, set[str]] = {}
    for a, b in links:
        after.setdefault(a, set()).add(b)

    def reach(node: str) -> set[str]:
        seen, stack = set(), [node]
        while stack:
            for following in after.get(stack.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
        return seen

    return {(a, b) for a, b in links if not any(b in reach(c) for c in after[a] if c != b)}


def layout(stages: Mapping[str, Any], links: list[tuple[str, str]]) -> dict[str, tuple[int, float]]:
    """Column and row of each stage: as late as what needs it allows; the longest way is row 0, the others stand below it."""
    names = list(stages)
    depth: dict[str, int] = {}

    def longest(node: str) -> int:  # steps to the end
        if node not in depth:
            depth[node] = 1 + max((longest(b) for a, b in links if a == node), default=-1)
        return depth[node]

    last = max(map(longest, names), default=0)
    columns: dict[int, list[str]] = {}
    for name in names:
        columns.setdefault(last - longest(name), []).append(name)
    trunk, node = set(), next((n for n in names if longest(n) == last), None)
    while node is not None:
        trunk.add(node)
        node = next((b for a, b in links if a == node and longest(b) == longest(node) - 1), None)
    place: dict[str, tuple[int, float]] = {}
    for column in sorted(columns):
        others = [name for name in columns[column] if name not in trunk]
        for name in columns[column]:
            if name in trunk:
                place[name] = (column, 0.0)
        for i, name in enumerate(others):
            place[name] = (column, 1.0 + i)
    return place


def draw(stages: Mapping[str, Mapping[str, Any]], done: Mapping[str, bool]) -> str:
    """An <svg> of the stages: filled when they have run, outlined when not; colours tell data, models and evaluation."""
    links = edges(stages)
    strong, place = direct(links), layout(stages, links)
    columns, rows = max(c for c, _ in place.values()) + 1, max(r for _, r in place.values()) + 1
    width, height = columns * (BOX_W + GAP_X) - GAP_X + 4, rows * (BOX_H + GAP_Y) + 40
    at = {name: (2 + c * (BOX_W + GAP_X), 38 + r * (BOX_H + GAP_Y)) for name, (c, r) in place.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="stages">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0.8 L7 4 L0 7.2 z" fill="var(--muted)"/></marker></defs>',
    ]
    for a, b in sorted(links, key=lambda link: link in strong):
        parts.append(_link(at[a], at[b], (a, b) in strong, place[a], place[b]))
    for name, (x, y) in at.items():
        colour = STAGE_COLOUR.get(name, "data")
        fill = (
            f'fill="var(--{colour})"' if done.get(name) else f'fill="var(--paper)" stroke="var(--{colour})" stroke-dasharray="3 3"'
        )
        ink = "var(--paper)" if done.get(name) else f"var(--{colour})"
        parts.append(f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{BOX_H}" rx="7" {fill}/>')
        parts.append(
            f'<text x="{x + BOX_W / 2}" y="{y + BOX_H / 2 + 4.2}" text-anchor="middle" fill="{ink}" '
            f'style="font: 600 11.5px {FONT.replace(chr(39), "")}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _link(start: tuple[float, float], end: tuple[float, float], strong: bool, a: tuple[int, float], b: tuple[int, float]) -> str:
    x0, y0, x1, y1 = start[0] + BOX_W, start[1] + BOX_H / 2, end[0], end[1] + BOX_H / 2
    if a[1] == b[1] and b[0] - a[0] > 1:  # over the boxes between, in an arc
        x0, x1, y0 = start[0] + BOX_W / 2, end[0] + BOX_W / 2, start[1]
        lift = y0 - 10 - 2.4 * (b[0] - a[0])
        a1, a2, b1, b2 = x0 + 14, x0 + 40, x1 - 14, x1 - 40
        path = f"M{x0} {y0} C{a1} {lift} {a1} {lift} {a2} {lift} L{b2} {lift} C{b1} {lift} {b1} {lift} {x1} {end[1] - 1}"
    else:
        bend = (x1 - x0) * 0.5
        path = f"M{x0} {y0} C{x0 + bend} {y0} {x1 - bend} {y1} {x1 - 1} {y1}"
    look = (
        'stroke="var(--muted)" stroke-width="1.3" marker-end="url(#tip)"' if strong else 'stroke="var(--grid)" stroke-width="1.2"'
    )
    return f'<path d="{path}" fill="none" {look}/>'


def _paths(entry: Mapping[str, Any], kind: str) -> list[str]:
    return [next(iter(item)) if isinstance(item, dict) else item for item in entry.get(kind, [])]

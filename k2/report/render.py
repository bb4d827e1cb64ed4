"""A page as HTML, self-contained, and as Markdown."""

from html import escape
from itertools import groupby
from typing import Any

from k2.report.page import Figure, Heading, Page, Sample, Table, Text, Tiles
from k2.report.style import FONT, variables

CSS = """
* { box-sizing: border-box }
html { color-scheme: light dark }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.55 FONT; -webkit-font-smoothing: antialiased }
main { max-width: 1080px; margin: 0 auto; padding: 48px 28px 80px }
h1 { font-size: 30px; letter-spacing: -0.02em; margin: 0 }
h2 { font-size: 19px; letter-spacing: -0.01em; margin: 44px 0 6px; padding-top: 16px; border-top: 1px solid var(--grid) }
.subtitle { color: var(--muted); margin: 4px 0 28px }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin-bottom: 36px }
.tile { background: var(--panel); border-radius: 10px; padding: 14px 16px }
.tile .label, .tile .remark { color: var(--muted); font-size: 12.5px }
.tile .value { font-size: 27px; font-weight: 650; letter-spacing: -0.02em; line-height: 1.3; font-variant-numeric: tabular-nums }
figure { margin: 20px 0 34px }
figure svg { width: 100%; height: auto; display: block; overflow: visible }
figcaption, .missing { color: var(--muted); font-size: 13px; max-width: 112ch; margin-top: 8px }
.missing { border: 1px dashed var(--grid); border-radius: 10px; padding: 18px; margin: 20px 0; max-width: none }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; margin: 16px 0 26px; font-size: 13.5px; font-variant-numeric: tabular-nums }
th { color: var(--muted); font-weight: 500; text-align: right; border-bottom: 1px solid var(--muted); padding: 6px 10px }
th { vertical-align: bottom }
td { text-align: right; border-bottom: 1px solid var(--grid); padding: 6px 10px }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
td:first-child { font-weight: 600 }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 8px }
details table td { font-family: MONO; font-size: 12px; text-align: left; font-weight: 400; padding: 3px 10px }
summary { cursor: pointer; color: var(--muted) }
pre { background: var(--panel); border-radius: 10px; padding: 14px 16px; overflow-x: auto; font: 13px/1.5 MONO }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 12px; margin-top: 16px }
.sample { border-left: 3px solid; background: var(--panel); overflow: hidden; border-radius: 0 10px 10px 0; padding: 10px 14px }
.sample { font-size: 13px }
.sample .head { font-size: 12px; color: var(--muted); margin-bottom: 4px }
.sample .head b { margin-right: 8px }
.turn { display: grid; grid-template-columns: 66px 1fr; gap: 8px; padding: 1px 0 }
.turn .who { color: var(--muted); font-size: 12px; padding-top: 1px }
.turn .what { white-space: pre-wrap; overflow-wrap: anywhere; font-family: MONO; font-size: 12.5px }
@media print {
  main { max-width: none; padding: 0 }
  figure, .sample, tr, .tile { break-inside: avoid }
  h2 { break-after: avoid }
  details:not([open]) { display: none }
}
""".replace("FONT", FONT).replace("MONO", "ui-monospace, Menlo, Consolas, monospace")


def html(page: Page) -> str:
    """One file with everything in it."""
    body: list[str] = []
    for stage, blocks in groupby(page.blocks, key=lambda block: block.stage if isinstance(block, Sample) else ""):
        made = "\n".join(map(_html, blocks))
        body.append(f'<div class="samples">\n{made}\n</div>' if stage else made)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(page.title)}</title>\n<style>\n{variables()}\n{CSS}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(page.title)}</h1>\n<p class="subtitle">{escape(page.subtitle)}</p>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _html(block: Any) -> str:
    match block:
        case Heading(text):
            return f"<h2>{escape(text)}</h2>"
        case Text(text, code):
            return f"<pre>{escape(text)}</pre>" if code else f'<p class="missing">{escape(text)}</p>'
        case Tiles(tiles):
            return '<div class="tiles">' + "".join(
                f'<div class="tile"><div class="label">{escape(label)}</div><div class="value">{escape(value)}</div>'
                f'<div class="remark">{escape(remark)}</div></div>'
                for label, value, remark in tiles
            ) + "</div>"  # fmt: skip
        case Figure(name, svg, caption):
            if svg is None:
                return f'<p class="missing">{escape(name)}: not run yet. {escape(caption)}</p>'
            return f'<figure id="{name}">{_unique(svg, name)}<figcaption>{escape(caption)}</figcaption></figure>'
        case Table(columns, rows, folded):
            head = "".join(f"<th>{escape(column)}</th>" for column in columns)
            lines = "".join(
                "<tr>" + "".join(f"<td>{'' if i else _dot(cell)}{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
                for row in rows
            )
            table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
            return f"<details><summary>{escape(folded)}</summary>{table}</details>" if folded else table
        case Sample(stage, turns, note):
            spoken = "".join(
                f'<div class="turn"><div class="who">{escape(who)}</div><div class="what">{escape(what)}</div></div>'
                for who, what in turns
            )
            return (
                f'<div class="sample" style="border-color: var(--{stage})"><div class="head">'
                f'<b style="color: var(--{stage})">{escape(stage)}</b>{escape(note)}</div>{spoken}</div>'
            )
    raise TypeError(f"not a block of the page: {block!r}")


def _dot(cell: str) -> str:
    """The colour of a model's name."""
    return (
        f'<span class="dot" style="background: var(--{cell})"></span>'
        if cell in ("pretrain", "anneal", "extend", "sft", "rl")
        else ""
    )


def _unique(svg: str, name: str) -> str:
    """Ids with the figure's name in front: several figures share one page."""
    return svg.replace('id="', f'id="{name}-').replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')


def markdown(page: Page) -> str:
    """The same page for a code host's viewer; figures are files beside it."""
    lines = [f"# {page.title}", "", page.subtitle, ""]
    for block in page.blocks:
        match block:
            case Heading(text):
                lines += [f"## {text}", ""]
            case Text(text, code):
                lines += ["```bash", text, "```", ""] if code else [text, ""]
            case Tiles(tiles):
                lines += _md_table([label for label, _, _ in tiles], [[f"**{value}** {remark}" for _, value, remark in tiles]])
            case Figure(name, svg, caption):
                lines += [f"![{name}](figures/{name}.svg)" if svg else f"*{name}: not run yet.*", "", caption, ""]
            case Table(columns, rows, folded):
                table = _md_table(columns, rows)
                lines += [f"<details><summary>{folded}</summary>", "", *table, "</details>", ""] if folded else table
            case Sample(stage, turns, note):
                spoken = [f"{who}: {what.replace('```', '~~~')}" for who, what in turns]
                lines += [f"**{stage}** {note}".strip(), "", "```text", *spoken, "```", ""]
    return "\n".join(lines)


def _md_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(columns), "|" + " --- |" * len(columns), *map(line, rows), ""]

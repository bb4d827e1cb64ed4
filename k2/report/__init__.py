"""One page about a run, in Markdown and HTML, made here and nowhere else: from metrics, curves and samples on disk.

    python -m k2.report        # writes report/index.html and report/index.md

No stage calls this and it calls no tracker: what a stage has not written yet is shown as not run.
"""

from pathlib import Path

from k2.report.page import build
from k2.report.records import Records
from k2.report.render import html, markdown


def write(root: Path) -> Path:
    """Write report/index.html (self-contained), index.md and figures/*.svg below `root`; returns the HTML page's path."""
    page = build(Records(root))
    folder = root / "report"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for block in page.figures():
        (folder / "figures" / f"{block.name}.svg").write_text(block.svg_file())
    (folder / "index.md").write_text(markdown(page))
    (folder / "index.html").write_text(html(page))
    return folder / "index.html"

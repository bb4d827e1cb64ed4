"""Stage tools: specifications of real tools, listed by their running server, and of evolved ones."""

import json

from k2.agentic import catalogue
from tasks.stage import Stage, run


def main(stage: Stage) -> None:
    tools = catalogue.build(stage.params.tools)
    folder = stage.out("tools")
    (folder / "tools.json").write_text(json.dumps(tools, indent=1) + "\n")
    stage.metrics(catalogue.summary(tools))


if __name__ == "__main__":
    run("tools", main)

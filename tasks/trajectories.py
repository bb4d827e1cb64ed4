"""Stage trajectories: simulated tool-use dialogues, judged; the rejected are kept with their verdict."""

import json

from k2 import llm
from k2.agentic import trajectories
from k2.data import records
from tasks.stage import Stage, run


def main(stage: Stage) -> None:
    tools = json.loads((stage.dep("tools") / "tools.json").read_text())
    settings = stage.params.llm
    model = llm.open_model(settings) if settings.provider == "openai" else None  # the packaged model is too small to judge
    data = trajectories.synthesise(tools, stage.params.trajectories, model)
    folder = stage.out("trajectories")
    records.write(folder / "train.jsonl", data.train)
    records.write(folder / "validation.jsonl", data.validation)
    records.write(folder / "rejected.jsonl", data.rejected)
    stage.metrics(trajectories.summary(data))


if __name__ == "__main__":
    run("trajectories", main)

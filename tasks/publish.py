"""The RL model as a Hugging Face folder that transformers provably computes alike, and a version in MLflow's model registry."""

import json

from k2 import release
from k2.model import hf
from k2.tokenizer.chat import ChatTokenizer
from k2.track import flatten
from tasks.stage import Stage, git_commit, run
from tasks.training import set_up


def main(stage: Stage) -> None:
    config = stage.params.publish
    set_up(stage.execution)
    source = stage.dep("rl")
    scores = flatten(json.loads(stage.dep("evaluate.json").read_text()).get("rl", {}), separator="/")
    numbers = {name: float(value) for name, value in scores.items() if type(value) in (int, float)}
    model, model_config = hf.load(source)
    folder, commit = stage.out("published"), git_commit()
    hf.save(model, model_config, folder, source)
    release.write_generation_config(folder, model_config, ChatTokenizer.load(folder))
    release.write_card(folder, config.registered_model, model, numbers, commit)
    difference = release.logit_difference(model, folder)
    release.check_tokenizer(folder)
    tags = {"path": "models/published", "mlflow.source.git.commit": commit}
    tags |= {f"dvc.{path}": digest for path, digest in stage.input_hashes().items()}
    version = stage.tracker.register(config.registered_model, config.alias, tags | {k: f"{v:.6g}" for k, v in numbers.items()})
    size = (folder / "model.safetensors").stat().st_size
    stage.metrics({"max_logit_difference": difference, "bytes": size, "registry_version": version})


if __name__ == "__main__":
    run("publish", main)

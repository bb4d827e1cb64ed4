"""Presets and overrides: YAML that is laid over params.yaml, its comments kept.

A preset names only what differs from params.yaml (`nano`). What comes out is checked by `k2.config.parse_params` like any other.
"""

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from k2.errors import ConfigError

FOLDER = Path(__file__).parent


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def overlay(text: str, preset: str) -> str:
    """params.yaml's text with a preset laid over it. ConfigError lists the presets that there are."""
    path = FOLDER / f"{preset}.yaml"
    if preset not in names():
        raise ConfigError(f"preset `{preset}` is not known; there are: {', '.join(names())} (k2/presets/)")
    return _edit(text, lambda tree: _merge(tree, _yaml().load(path.read_text())))


def override(text: str, values: dict[str, Any]) -> str:
    """params.yaml's text with single keys changed, `{"sft.optim.lr": 1e-3}`. ConfigError names a key that is not there."""

    def change(tree: CommentedMap) -> None:
        for dotted, value in values.items():
            *sections, key = dotted.split(".")
            node = tree
            for section in sections:
                node = node.get(section) if isinstance(node, dict) else None
            if not isinstance(node, dict) or not sections:
                raise ConfigError(f"{dotted}: no such key in params.yaml; write it as section.key=value, e.g. sft.optim.lr=1e-3")
            node[key] = value

    return _edit(text, change)


def parse_override(argument: str) -> tuple[str, Any]:
    """`sft.optim.lr=1e-3` as ("sft.optim.lr", 0.001); the value is YAML."""
    key, equals, value = argument.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"`{argument}`: write section.key=value, e.g. sft.optim.lr=1e-3")
    try:
        return key.strip(), _yaml().load(value)
    except YAMLError:
        raise ConfigError(f"`{argument}`: {value!r} is not a YAML value") from None


def _edit(text: str, change: Any) -> str:
    yaml, out = _yaml(), io.StringIO()
    try:
        tree = yaml.load(text)
    except YAMLError as error:
        raise ConfigError(f"params.yaml: not valid YAML: {' '.join(str(error).split())}") from None
    change(tree)
    yaml.dump(tree, out)
    return out.getvalue()


def _merge(tree: dict, over: dict) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = 4096, True
    yaml.representer.add_representer(type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null"))
    return yaml

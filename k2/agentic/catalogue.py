"""The catalogue of tools: real ones as their server lists them, then evolved ones."""

from collections import Counter
from typing import Any

from k2.agentic import evolve, real
from k2.config import ToolsConfig

Tool = dict[str, Any]


def build(config: ToolsConfig) -> list[Tool]:
    with real.serve() as server:
        tools = list(server.specifications)
    return tools + evolve.evolve(config.evolved_tools, config.seed)


def summary(tools: list[Tool]) -> dict[str, Any]:
    """Counts by origin and category, and the share of the report's 17 categories that have a tool."""
    categories = Counter(tool["category"] for tool in tools)
    return {
        "tools": len(tools),
        "by_origin": dict(Counter(tool["origin"] for tool in tools)),
        "applications": len({(tool["origin"], tool["application"]) for tool in tools}),
        "category_coverage": round(len(categories) / len(evolve.CATALOGUE), 4),
        "by_category": {category: categories[category] for category in evolve.CATALOGUE},
    }


def openai(tool: Tool) -> dict[str, Any]:
    """The compact OpenAI declaration of a tool: the MCP schema without its titles."""
    schema = tool["inputSchema"]
    properties = {
        name: {key: value for key, value in kind.items() if key != "title"} for name, kind in schema.get("properties", {}).items()
    }
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", [])}
    return {"type": "function", "function": {"name": tool["name"], "description": tool["description"], "parameters": parameters}}

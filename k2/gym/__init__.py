"""The gym: verifiable domains by name from params.yaml `gym.domains` (report section 3.2.1)."""

from k2.config import GymConfig
from k2.errors import ConfigError
from k2.gym.env import PASS, Domain, Env, Message, Step, Task
from k2.gym.reasoning import ReasoningDomain
from k2.gym.tool_use import ToolUseDomain

__all__ = ["PASS", "Domain", "Env", "Message", "Step", "Task", "make", "make_all"]


def make(domain: str, gym: GymConfig) -> Domain:
    """The domain of that name. ConfigError names gym.domains.<domain> and what is wrong with it."""
    if domain not in gym.domains:
        raise ConfigError(f"params.yaml: gym.domains.{domain} is not there; known domains: {', '.join(gym.domains)}")
    settings = dict(gym.domains[domain])
    if "dataset" in settings:
        return ReasoningDomain(domain, gym.held_out_seed, settings)
    if domain != "tool_use":
        raise ConfigError(f"params.yaml: gym.domains.{domain}: names no `dataset` of reasoning-gym (and is not `tool_use`)")
    return ToolUseDomain(domain, gym.held_out_seed, settings)


def make_all(gym: GymConfig) -> dict[str, Domain]:
    """Every domain of params.yaml, each with a token budget. ConfigError for one without."""
    for domain in gym.domains:
        if domain not in gym.max_new_tokens:
            raise ConfigError(f"params.yaml: gym.max_new_tokens.{domain}: missing; give the domain a token budget")
    return {domain: make(domain, gym) for domain in gym.domains}

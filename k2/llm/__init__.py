"""Language models that rephrase, play users and judge: one protocol, two providers.

model = k2.llm.open_model(params.llm)
model.generate([[{"role": "user", "content": "Say hello."}]], max_new_tokens=16, temperature=0.7, top_p=0.9, seed=0)
"""

from collections.abc import Callable
from typing import Any, Protocol

from k2.config import LLMConfig

Message = dict[str, Any]  # OpenAI's chat message


def ignore(finished: int) -> None:
    """The progress callback of who shows none."""


class ChatModel(Protocol):
    tokens: int  # generated so far, over all calls

    def generate(
        self,
        chats: list[list[Message]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        progress: Callable[[int], object] = ignore,
    ) -> list[str]:
        """One answer to each chat, in order. Temperature 0 is greedy; `progress(n)` hears of each n chats that are finished."""
        ...


def open_model(llm: LLMConfig, device: str = "auto") -> ChatModel:
    """The model of params.yaml's `llm`. K2Error says what is missing: a package, a folder, the endpoint's address or key."""
    if llm.provider == "openai":
        from k2.llm.endpoint import EndpointModel

        return EndpointModel(llm.model, llm.base_url, concurrency=llm.batch_size)
    from k2.llm.local import LocalModel

    return LocalModel.open(llm.model, llm.batch_size, device)

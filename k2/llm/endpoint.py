"""A model behind an OpenAI-compatible endpoint (vLLM, SGLang, a hosted one), many requests in flight."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from urllib.parse import urlsplit

from k2.errors import ConfigError, K2Error
from k2.llm import Message, ignore

KEY = "OPENAI_API_KEY"
RETRIES = 4  # with the client's exponential backoff, 0.5 s to 8 s
TIMEOUT = 300.0  # seconds of one request


class EndpointModel:
    """`concurrency` requests at a time. Lost connections, timeouts, 429 and 5xx are tried again; what the endpoint refuses (key,
    model, request) is not. The key is never shown.
    """

    def __init__(self, model: str, base_url: str | None, concurrency: int, retries: int = RETRIES) -> None:
        if not base_url:
            raise ConfigError(
                "params.yaml: llm.base_url: missing; provider `openai` needs the endpoint's address (http://host:8000/v1)"
            )
        key = os.environ.get(KEY)
        if not key:
            raise K2Error(f"{KEY}: not set; export the endpoint's key (any word for a server that wants none)")
        from openai import OpenAI  # 1 s

        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("params.yaml: llm.base_url: not an http(s) address; it reads like http://host:8000/v1")
        self.model, self.concurrency, self.tokens = model, concurrency, 0
        self._shown = (
            f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"  # without user and password
        )
        self._client = OpenAI(api_key=key, base_url=base_url, max_retries=retries, timeout=TIMEOUT)

    def generate(
        self,
        chats: list[list[Message]],
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        progress: Callable[[int], object] = ignore,
    ) -> list[str]:
        """See ChatModel. Chat i is sampled with seed + i, if the endpoint honours seeds. Raises K2Error in one line."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = {
                pool.submit(self._ask, chat, max_new_tokens, temperature, top_p, seed + i): i for i, chat in enumerate(chats)
            }
            answers = [""] * len(chats)
            try:
                for future in as_completed(futures):
                    answers[futures[future]], tokens = future.result()
                    self.tokens += tokens
                    progress(1)
            except K2Error:
                pool.shutdown(wait=False, cancel_futures=True)  # the first refusal ends all
                raise
        return answers

    def _ask(self, chat: list[Message], max_new_tokens: int, temperature: float, top_p: float, seed: int) -> tuple[str, int]:
        """An answer and the tokens that it took."""
        import openai

        try:
            reply = self._client.chat.completions.create(
                model=self.model,
                messages=chat,  # type: ignore[arg-type]
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
            )
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise K2Error(f"{self._shown}: refuses the key in {KEY} (HTTP {error.status_code}); export a valid one") from None
        except openai.NotFoundError:
            raise K2Error(f"{self._shown}: has no model `{self.model}`; set llm.model and llm.base_url in params.yaml") from None
        except openai.APIStatusError as error:
            raise K2Error(f"{self._shown}: HTTP {error.status_code} for model `{self.model}`; see the endpoint's log") from None
        except openai.APITimeoutError:
            raise K2Error(
                f"{self._shown}: no answer within {TIMEOUT:.0f} s, {self._client.max_retries} retries; lower llm.batch_size"
            ) from None
        except openai.APIConnectionError:
            raise K2Error(
                f"{self._shown}: not reachable; start it, mend llm.base_url in params.yaml, or set llm.provider: local"
            ) from None
        if not reply.choices:
            raise K2Error(f"{self._shown}: answered without a choice; is it an OpenAI-compatible endpoint?")
        return reply.choices[0].message.content or "", reply.usage.completion_tokens if reply.usage else 0

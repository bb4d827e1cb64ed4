import socket

import pytest

from k2.config import LLMConfig
from k2.errors import ConfigError, K2Error
from k2.llm import open_model
from k2.llm.endpoint import EndpointModel

KEY = "sk-secret-of-the-test"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_answers_keep_the_order_with_many_requests_in_flight(endpoint) -> None:
    """Answer i belongs to chat i, batch_size requests run together and no more, tokens and progress add up."""
    endpoint.delay = 0.1
    model = open_model(LLMConfig("openai", "m", endpoint.url, 4, 0.5, 0.9))
    words, heard = [f"word {i}" for i in range(12)], []
    answers = model.generate(ask(*words), 7, 0.5, 0.9, seed=100, progress=heard.append)
    assert answers == [word.upper() for word in words]
    assert endpoint.most_in_flight == 4
    assert model.tokens == 36 and sum(heard) == 12
    sent = {request["messages"][0]["content"]: request for request in endpoint.requests}
    first = sent["word 0"]
    assert first["path"] == "/v1/chat/completions" and first["model"] == "m" and endpoint.keys == {f"Bearer {KEY}"}
    assert (first["max_tokens"], first["temperature"], first["top_p"]) == (7, 0.5, 0.9)
    assert [sent[word]["seed"] for word in words] == list(range(100, 112))


def test_a_busy_endpoint_is_asked_again(endpoint) -> None:
    endpoint.failures = [503, 429]
    assert EndpointModel("m", endpoint.url, 1).generate(ask("a"), 4, 0, 1, 0) == ["A"]
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(("status", "words"), [(401, "OPENAI_API_KEY"), (404, "has no model `m`"), (400, "HTTP 400")])
def test_a_refusal_is_one_line_without_the_key_and_is_not_repeated(endpoint, status: int, words: str) -> None:
    endpoint.failures = [status] * 9
    with pytest.raises(K2Error) as error:
        EndpointModel("m", endpoint.url, 1).generate(ask("a"), 4, 0, 1, 0)
    assert words in str(error.value) and "127.0.0.1" in str(error.value)
    assert KEY not in str(error.value) and "\n" not in str(error.value)
    assert len(endpoint.requests) == 1


def test_an_endpoint_that_is_not_there_is_named_without_its_password() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(K2Error, match="not reachable") as error:
        EndpointModel("m", f"http://me:hidden@127.0.0.1:{port}/v1", 2, retries=1).generate(ask("a", "b"), 4, 0, 1, 0)
    assert f"http://127.0.0.1:{port}/v1" in str(error.value) and "hidden" not in str(error.value)


def test_what_is_missing_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="llm.base_url: missing"):
        open_model(LLMConfig("openai", "m", None, 1, 0.5, 0.9))
    with pytest.raises(ConfigError, match="not an http"):
        open_model(LLMConfig("openai", "m", "localhost:8000", 1, 0.5, 0.9))
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(K2Error, match="OPENAI_API_KEY: not set"):
        open_model(LLMConfig("openai", "m", "http://127.0.0.1:1/v1", 1, 0.5, 0.9))

"""The packaged model, unpacked once into the checkout's own .k2/llm, and a real endpoint on the loopback interface."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from k2.llm import local

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def smollm2() -> Iterator[local.LocalModel]:
    cache, local.CACHE = local.CACHE, ROOT / local.CACHE
    yield local.LocalModel.open(local.SMOLLM2, batch_size=4)
    local.CACHE = cache


class Endpoint:
    """A server that speaks OpenAI's chat protocol: `reply(messages)` makes the text, `failures` are statuses to begin with."""

    def __init__(self) -> None:
        self.reply: Callable[[list[dict[str, Any]]], str] = lambda messages: messages[-1]["content"].upper()
        self.failures: list[int] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.delay = 0.0
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with endpoint.lock:
                    endpoint.in_flight += 1
                    endpoint.most_in_flight = max(endpoint.most_in_flight, endpoint.in_flight)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                time.sleep(endpoint.delay)
                with endpoint.lock:
                    endpoint.requests.append({"path": self.path, **body})
                    endpoint.keys.add(self.headers["Authorization"])
                    status = endpoint.failures.pop(0) if endpoint.failures else 200
                    endpoint.in_flight -= 1
                if status == 200:
                    message = {"role": "assistant", "content": endpoint.reply(body["messages"])}
                    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
                    choice = {"index": 0, "message": message, "finish_reason": "stop"}
                    answer: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
                    answer |= {"choices": [choice], "usage": usage}
                else:
                    answer = {"error": {"message": f"refused {self.headers['Authorization']}", "type": "x", "code": status}}
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    yield served
    served.server.shutdown()
    served.server.server_close()
    thread.join()

"""How verbs and buckets reach a receiver. In one process it is a thread; other processes and machines plug in here."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from k2.sync.receiver import Receiver


class Transport(Protocol):
    """One receiver as the sender sees it."""

    def buffer(self, half: int) -> Tensor:
        """Half 0 or 1 of the double buffer that both sides see, uint8."""
        ...

    def post(self, verb: str, args: tuple) -> None:
        """Start a verb of the receiver; verbs run in order, one at a time."""
        ...

    def wait(self) -> str | None:
        """The answer to the oldest verb that has not been answered: None, or what went wrong."""
        ...

    def abort(self) -> None:
        """Let running verbs end, forget their answers and what was received."""
        ...


class LocalTransport:
    """A receiver in this process, on a thread of its own: copies and checksums run outside of the interpreter lock."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-sync")
        self._posted: deque[Future[Any]] = deque()

    def buffer(self, half: int) -> Tensor:
        return self._receiver.halves[half]

    def post(self, verb: str, args: tuple) -> None:
        self._posted.append(self._thread.submit(getattr(self._receiver, verb), *args))

    def wait(self) -> str | None:
        error = self._posted.popleft().exception()
        return None if error is None else str(error) or type(error).__name__

    def abort(self) -> None:
        while self._posted:
            self._posted.popleft().exception()
        self._thread.submit(self._receiver.abort).result()

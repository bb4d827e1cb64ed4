"""Prefect without a server of one's own: a temporary API for one flow run, its database in .k2/prefect."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from k2.errors import K2Error

START_SECONDS = 180.0


def api_configured() -> bool:
    """Whether the user has a Prefect server: PREFECT_API_URL in the environment, or in the active profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    try:
        profiles = tomllib.loads((home / "profiles.toml").read_text())
        name = os.environ.get("PREFECT_PROFILE", profiles.get("active", ""))
        return bool(profiles.get("profiles", {}).get(name, {}).get("PREFECT_API_URL"))
    except (OSError, tomllib.TOMLDecodeError):
        return False


class EphemeralServer:
    """Starts at once, in a process group of its own; `address` waits until it answers."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.log = home / "server.log"
        environment = os.environ | {
            "PREFECT_HOME": str(home.resolve()),
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",  # leaves out the services that only matter to a lasting server
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
            "DO_NOT_TRACK": "1",
        }
        command = [sys.executable, "-P", "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--log-level", "error", "--lifespan", "on"]
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.group = self._process.pid

    @property
    def address(self) -> str:
        """The API's URL, once it is healthy. The very first start migrates a new database, which takes 10 to 20 s."""
        url, until = f"http://127.0.0.1:{self._port}/api", time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return url
            time.sleep(0.1)
        raise K2Error(f"Prefect's temporary server did not start, see {self.log}; or set PREFECT_API_URL to a server of yours")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def prefect_settings(address: str | None, home: Path) -> Iterator[None]:
    """Prefect for a person at a terminal: quiet, and with the temporary server at `address` unless that is None."""
    from prefect.logging.configuration import setup_logging
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    ours: dict[Any, Any] = {PREFECT_API_URL: address, PREFECT_HOME: home.resolve(), PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings(ours if address is not None else {}):
        setup_logging()
        for logger in [logging.getLogger(), *(logging.getLogger(name) for name in logging.root.manager.loggerDict)]:
            for handler in logger.handlers:
                if type(handler).__name__ == "PrefectConsoleHandler":  # flows.console says it shorter
                    handler.setLevel(logging.CRITICAL)
        yield

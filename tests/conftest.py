"""What all tests share: no network, no tracking unless a test asks for it, and toy projects with real git, DVC and Prefect."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUIET = {
    "K2_TRACKING": "off",  # tests of tracking switch it on
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_AUTHOR_NAME": "test", "GIT_AUTHOR_EMAIL": "test@example.org",
    "GIT_COMMITTER_NAME": "test", "GIT_COMMITTER_EMAIL": "test@example.org",
}  # fmt: skip
os.environ.update(QUIET)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["PYTHONPATH"] = str(ROOT)
for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "PREFECT_PROFILE", "K2_TRACK_SOCKET"):
    os.environ.pop(name, None)


class Project:
    """A clone-like folder with a DAG of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **files: str) -> None:
        """`write(**{"sft.py": "..."})`, folders as needed."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def edit(self, name: str, old: str, new: str) -> None:
        text = (self.root / name).read_text()
        assert old in text
        (self.root / name).write_text(text.replace(old, new, 1))

    def run(self, *command: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        """Run to the end; `python` and `dvc` are those of the tests."""
        done = subprocess.run(
            command, cwd=self.root, env=os.environ | env, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert not check or done.returncode == 0, (
            f"{command} exited {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """Run in the background, in a process group of its own."""
        return subprocess.Popen(
            command, cwd=self.root, env=os.environ | env, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def pipeline(self, *arguments: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "flows.pipeline", *arguments, check=check, **env)

    def commit(self, message: str = "more") -> None:
        self.run("git", "add", "-A")
        self.run("git", "commit", "-qm", message)


@pytest.fixture
def make_project(tmp_path: Path) -> Callable[..., Project]:
    """`make_project(dag, **files)`: git and DVC initialised, the real params.yaml, everything committed."""

    def make(dag: str, **files: str) -> Project:
        project = Project(tmp_path / "project")
        project.root.mkdir()
        shutil.copy(ROOT / "params.yaml", project.root)
        shutil.copy(ROOT / ".gitignore", project.root)
        shutil.copy(ROOT / ".dvcignore", project.root)
        project.write(**{"dvc.yaml": dag}, **files)
        project.run("git", "init", "-q", "-b", "main")
        project.run("dvc", "init", "-q")
        shutil.copy(ROOT / ".dvc/config", project.root / ".dvc/config")
        project.commit("first")
        return project

    return make


@pytest.fixture
def copy_tree() -> Callable[[Path], Project]:
    """`copy_tree(folder)`: the working tree as it is, uncommitted changes too, as a repository of one commit."""

    def copy(folder: Path) -> Project:
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        project = Project(folder)
        project.run("git", "init", "-q", "-b", "main")
        project.commit("first")
        return project

    return copy


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prefect server on a free port, one for all tests; its address."""
    home = tmp_path_factory.mktemp("prefect")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {"PREFECT_HOME": str(home)}, cwd=home, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < until and server.poll() is None, (home / "log").read_text()[-3000:]
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/api"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


@pytest.fixture
def end_group() -> Iterator[Callable[[subprocess.Popen], None]]:
    """Processes to end with their groups when the test is over, whatever became of it."""
    started: list[subprocess.Popen] = []
    yield started.append
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

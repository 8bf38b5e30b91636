"""A real Label Studio as a child process on loopback, with SQLite in a directory of its own.

scripts/tools installs it into an environment of its own, and makes a data directory with a user (`python -m
tests.support.label_studio`), because the migrations of a new database take up to a minute; each start gets a copy. It
calls nobody: analytics, error reports and the look for a newer version are off, and its feature flags are in a file.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from qinfer.testing import wait_until
from tests.support.servers.servers import free_port

TOOL = Path(__file__).resolve().parents[2] / ".venv" / "tools" / "label-studio"
DATA = TOOL / "data"
NO_LABEL_STUDIO = "Label Studio is not installed; scripts/tools fetches it"

_DATABASE = "label_studio.sqlite3"
_USER = "somebody@example.org"
_SECRET = "secret-of-a-test"
_LEGACY_TOKEN = "legacy-token-of-a-test"
_MIGRATED_WITHIN_S = 300.0
_READY_WITHIN_S = 90.0
_STOP_WITHIN_S = 10.0

_ENVIRONMENT = {
    "COLLECT_ANALYTICS": "false",
    "LATEST_VERSION_CHECK": "false",
    "SENTRY_DSN": "",
    "FRONTEND_SENTRY_DSN": "",
    "ML_BLOCK_LOCAL_IP": "false",  # or ML backends at private addresses are refused
    "SSRF_PROTECTION_ENABLED": "false",  # or webhooks are not sent to private addresses
}


def is_there() -> bool:
    """Tells whether it is installed, with a data directory to copy."""
    return (DATA / _DATABASE).exists()


class LabelStudio:
    """What tests do with a running Label Studio, by its API.

    Attributes:
        url: Where it is.
        token: A personal access token, as a new installation gives them.
        legacy_token: A legacy token of the same user; the organization allows them.
        process: What runs.
    """

    def __init__(self, process: "LabelStudioProcess") -> None:
        self.process = process
        self.url = process.url
        self.legacy_token = _LEGACY_TOKEN
        headers = {"authorization": f"Token {_LEGACY_TOKEN}"}
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=60.0, trust_env=False)
        self.token: str = self.call("POST", "/api/token/")["token"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, method: str, path: str, body: object = None, **words: Any) -> httpx.Response:
        """Sends a call, and returns the reply whatever it is."""
        return self._http.request(method, path, json=body, params=words)

    def call(self, method: str, path: str, body: object = None, **words: Any) -> Any:
        """Sends a call that succeeds; returns the reply's JSON."""
        reply = self.send(method, path, body, **words)
        assert reply.is_success, f"{method} {path}: {reply.status_code} {reply.text[:2000]}"
        return reply.json()

    def project(self, title: str, label_config: str) -> int:
        """Makes a project; returns its id."""
        return int(self.call("POST", "/api/projects/", {"title": title, "label_config": label_config})["id"])

    def add_tasks(self, project: int, data: Sequence[dict[str, Any]]) -> list[int]:
        """Imports tasks; returns their ids in order."""
        return self.add(project, [{"data": each} for each in data])

    def add(self, project: int, tasks: Sequence[dict[str, Any]]) -> list[int]:
        """Imports tasks with all that belongs to them; returns their ids in order."""
        made = self.call("POST", f"/api/projects/{project}/import", tasks, return_task_ids="true")
        return [int(task) for task in made["task_ids"]]

    def upload(self, project: int, name: str, content: bytes) -> int:
        """Imports a file that becomes a task of its own; returns the task's id."""
        reply = self._http.post(f"/api/projects/{project}/import", files={"file": (name, content)})
        assert reply.is_success, reply.text
        return max(int(task["id"]) for task in self.tasks(project))

    def tasks(self, project: int) -> list[dict[str, Any]]:
        """Returns a project's tasks with their data, without asking for predictions."""
        words = {"project": project, "page_size": 1000, "fields": "all"}
        return list(self.call("GET", "/api/tasks/", **words)["tasks"])

    def predictions(self, project: int) -> dict[int, list[dict[str, Any]]]:
        """Returns task → its predictions, oldest first."""
        found: dict[int, list[dict[str, Any]]] = {}
        for each in sorted(self.call("GET", "/api/predictions/", project=project), key=lambda each: int(each["id"])):
            found.setdefault(int(each["task"]), []).append(each)
        return found

    def connect(self, project: int, url: str, **more: Any) -> httpx.Response:
        """Makes a server the ML backend of a project, as the dialogue in its settings does."""
        return self.send("POST", "/api/ml/", {"project": project, "url": url, "title": "qinfer", **more})

    def retrieve(self, project: int) -> None:
        """Asks the ML backend for predictions of all tasks, as the data manager's action does."""
        everything = {"selectedItems": {"all": True, "excluded": []}, "filters": {"conjunction": "and", "items": []}}
        self.call("POST", "/api/dm/actions", everything, id="retrieve_tasks_predictions", project=project)

    def annotate(self, backend: int, task: int) -> dict[str, Any]:
        """Asks an interactive ML backend about a task that a person works on."""
        path = f"/api/ml/{backend}/interactive-annotating"
        return dict(self.call("POST", path, {"task": task, "context": {"result": []}}))


class LabelStudioProcess:
    """The process of a Label Studio.

    Args:
        directory: For its data and its log.
    """

    def __init__(self, directory: Path) -> None:
        shutil.copytree(DATA, directory / "data")
        self.log = directory / "log"
        self._directory = directory
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts it, at the same address each time, and waits until it answers."""
        options = ["start", "--no-browser", "--internal-host", "127.0.0.1", "--port", str(self._port)]
        environment = _environment(self._directory / "data")
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                _command(*options), stdout=output, stderr=output, env=environment, cwd=self._directory
            )
        wait_until(lambda: self._process.poll() is not None or _is_healthy(self.url), _READY_WITHIN_S, "Label Studio")
        assert self._process.poll() is None, self.log.read_text()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.wait(_STOP_WITHIN_S)


@contextmanager
def label_studio(directory: Path) -> Iterator[LabelStudio]:
    """Runs Label Studio with its data and log in a directory."""
    process = LabelStudioProcess(directory)
    try:
        process.start()
        with LabelStudio(process) as running:
            yield running
    finally:
        process.kill()


def make_data() -> None:
    """Makes the data directory that is copied: a migrated database with a user."""
    new = DATA.with_name("data.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    user = ["--username", _USER, "--password", _SECRET, "--user-token", _LEGACY_TOKEN, "--enable-legacy-api-token"]
    subprocess.run(
        _command("init", "--quiet", *user), env=_environment(new), cwd=new, check=True, timeout=_MIGRATED_WITHIN_S
    )
    new.rename(DATA)


def _command(*options: str) -> list[str]:
    return [str(TOOL / "bin" / "python"), "-m", "label_studio.server", *options]


def _environment(data: Path) -> dict[str, str]:
    """Returns the whole environment: it reads names such as HOST and DEBUG, too."""
    own = {f"LABEL_STUDIO_{name}": value for name, value in _ENVIRONMENT.items()}
    own["LABEL_STUDIO_BASE_DATA_DIR"] = own["HOME"] = str(data)
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **own}


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


if __name__ == "__main__":
    make_data()

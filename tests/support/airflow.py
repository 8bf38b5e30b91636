"""A real Airflow on loopback, with SQLite in a directory of its own: api-server, scheduler, triggerer, DAG processor.

scripts/tools installs it into an environment of its own. The checkout is found by PYTHONPATH, with the entry points of
pyproject.toml, as pip would install them.
"""

import json
import os
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from qinfer.testing import wait_until
from tests.support.servers.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / ".venv" / "tools" / "airflow"
AIRFLOW = (str(TOOL / "bin" / "python"), "-m", "airflow")
"""Not `bin/airflow`, whose first line names the directory in which it was installed, from where a checkout may move."""
NO_AIRFLOW = "Airflow is not installed; scripts/tools fetches it"

_MIGRATED_WITHIN_S = 300.0
_READY_WITHIN_S = 300.0
_STATE_WITHIN_S = 240.0
_STOP_WITHIN_S = 30.0
_PROGRAMS = ("scheduler", "triggerer", "dag-processor")


def is_there() -> bool:
    """Tells whether it is installed."""
    return (TOOL / "bin" / "airflow").exists()


class Airflow:
    """An Airflow with an empty database, of which nothing runs yet.

    Args:
        home: Its directory, with `dags` for DAG files.
        connection: The connection `qinfer_default`.
    """

    def __init__(self, home: Path, connection: dict[str, object]) -> None:
        self.home, self.dags = home, home / "dags"
        self.dags.mkdir(parents=True)
        self._port = free_port()
        self._environment = _environment(home, self._port) | {"AIRFLOW_CONN_QINFER_DEFAULT": json.dumps(connection)}
        self.command("db", "migrate", within_s=_MIGRATED_WITHIN_S)

    def command(self, *words: str, within_s: float = 120.0) -> str:
        """Runs `airflow …`; returns what it prints on stdout."""
        return self._run(*AIRFLOW, *words, within_s=within_s)

    def python(self, script: str, within_s: float = 120.0) -> str:
        """Runs a script in Airflow's environment; returns what it prints on stdout."""
        return self._run(str(TOOL / "bin" / "python"), "-c", script, within_s=within_s)

    @contextmanager
    def serving(self) -> Iterator["Serving"]:
        """Runs all of its programs, once they answer."""
        with ExitStack() as opened:
            server = self._start("api-server", "--port", str(self._port), "--workers", "1")
            opened.callback(stop, server)
            serving = Serving(self, f"http://127.0.0.1:{self._port}")
            opened.enter_context(serving.http)
            for name in _PROGRAMS:
                serving.start(name)
                opened.callback(serving.stop, name)
            serving.wait_until_up()
            yield serving

    def _start(self, *words: str) -> "subprocess.Popen[bytes]":
        with (self.home / f"{words[0]}.log").open("ab") as log:
            return subprocess.Popen(
                [*AIRFLOW, *words],
                env=self._environment,
                stdout=log,
                stderr=log,
                cwd=self.home,
                start_new_session=True,
            )

    def _run(self, *words: str, within_s: float) -> str:
        ended = subprocess.run(
            words, env=self._environment, capture_output=True, text=True, timeout=within_s, cwd=self.home, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


class Serving:
    """A running Airflow, by its REST API."""

    def __init__(self, airflow: Airflow, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60.0)
        self.programs: dict[str, subprocess.Popen[bytes]] = {}
        self._airflow = airflow

    def start(self, name: str) -> None:
        """Starts a program."""
        self.programs[name] = self._airflow._start(name)

    def stop(self, name: str) -> None:
        """Stops a program."""
        stop(self.programs[name])

    def kill(self, name: str) -> None:
        """Kills a program with its children, as a machine that goes away does."""
        os.killpg(self.programs[name].pid, signal.SIGKILL)
        self.programs[name].wait()

    def wait_until_up(self) -> None:
        """Waits until the API answers, and gets a token from it."""

        def answers() -> bool:
            try:
                reply = self.http.get("/auth/token")
            except httpx.TransportError:
                return False
            if reply.is_success:
                self.http.headers["Authorization"] = f"Bearer {reply.json()['access_token']}"
            return reply.is_success

        wait_until(answers, _READY_WITHIN_S, "an API that answers")

    def run(self, dag: str, run_id: str) -> None:
        """Starts a run of a DAG, once its file is read."""
        path = f"/api/v2/dags/{dag}"
        wait_until(lambda: self.http.get(path).is_success, _READY_WITHIN_S, f"the DAG {dag}")
        self.http.patch(path, json={"is_paused": False}).raise_for_status()
        self.http.post(f"{path}/dagRuns", json={"dag_run_id": run_id, "logical_date": None}).raise_for_status()

    def task(self, dag: str, run_id: str, task: str) -> dict[str, Any]:
        """Returns a task of a run: `state`, `try_number` and more."""
        reply = self.http.get(f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}")
        return dict(reply.raise_for_status().json())

    def wait_for(self, dag: str, run_id: str, task: str, state: str) -> None:
        """Waits until a task is in a state."""
        wait_until(lambda: self.task(dag, run_id, task)["state"] == state, _STATE_WITHIN_S, f"a task that is {state}")

    def mark_failed(self, dag: str, run_id: str, task: str) -> None:
        """Marks a task as failed, as a person does who wants it to stop."""
        path = f"/api/v2/dags/{dag}/dagRuns/{run_id}/taskInstances/{task}"
        self.http.patch(path, json={"new_state": "failed"}).raise_for_status()


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Asks a program and its children to end, and kills them if they do not."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(home: Path, port: int) -> dict[str, str]:
    package = home / "packages" / "qinfer_ml-0.dist-info"
    package.mkdir(parents=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = project["entry-points"]["apache_airflow_provider"]
    lines = ["[apache_airflow_provider]", *(f"{name} = {value}" for name, value in points.items())]
    (package / "entry_points.txt").write_text("\n".join(lines))
    return {
        "PATH": f"{TOOL / 'bin'}:{os.environ['PATH']}",
        "HOME": str(home),
        "PYTHONPATH": f"{ROOT}:{package.parent}",
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API_AUTH__JWT_SECRET": "a-secret-of-a-test-that-is-long-enough",
        "AIRFLOW__API__SECRET_KEY": "another-secret-of-a-test",
        "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "False",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
        "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "1",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
    }

"""The secrets of `qinfer up` against a model that looks for them in every process, as code of an ordinary user.

Root may read every process, so the server runs without root's capabilities where the tests run as root.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from qinfer.cli.local.machine import RUN_FILE
from qinfer.testing import wait_until
from tests.integration.cli.test_up import clean_environment
from tests.support.python_models import HEADER, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc"),
    pytest.mark.skipif(
        os.getuid() == 0 and not shutil.which("setpriv"), reason="root without setpriv reads everything"
    ),
]
WITHIN_S = 60.0
BODY = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}

SECRETS = {
    "QINFER_WEBHOOKS__SECRET": "whsec_aVFsiMP9cAzo",
    "QINFER_LABELING__TOKEN": "token-GJAZDbrTwB7S",
    "QINFER_CONSOLE__PROMETHEUS_URL": "http://user:prometheus-pK5wXc8JtY3v@127.0.0.1:9",
    "QINFER_HTTP__RESTRICTED": '["logging:hidden=restricted-Mvxn0SQ2ub1l"]',
    "QINFER_AUTH__KEYS_FILE": "",
    "AWS_SECRET_ACCESS_KEY": "store-gvCzmrL6WwTt",
    "HF_TOKEN": "hf_2yCqOYMVtw6E",
    "ACME_DB_PASSWORD": "database-Rg1qj7mtQy4J",
    "https_proxy": "http://user:proxy-hZ3VRv0MPdeW@127.0.0.1:9",
}

SPY = (
    HEADER
    + """
import re

def found(pid, needles):
    readable, leaks = [], []
    place = f"/proc/{pid}"
    def look(name, data):
        leaks.extend(f"{needle} in {name}" for needle in needles if needle.encode() in data)
    for name in ("environ", "cmdline"):
        try:
            with open(f"{place}/{name}", "rb") as file:
                look(name, file.read())
            readable.append(name)
        except OSError:
            pass
    try:
        with open(f"{place}/maps") as file:
            spans = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", file.read(), re.M)
        readable.append("maps")
        with open(f"{place}/mem", "rb", 0) as file:
            readable.append("mem")
            for begin, end in spans:
                try:
                    file.seek(int(begin, 16))
                    look("mem", file.read(min(int(end, 16) - int(begin, 16), 64 << 20)))
                except OSError:
                    pass
    except OSError:
        pass
    try:
        for number in os.listdir(f"{place}/fd"):
            look("fd", os.fsencode(os.readlink(f"{place}/fd/{number}")))
        readable.append("fd")
    except OSError:
        pass
    return {"readable": readable, "leaks": sorted(set(leaks))}

class TritonPythonModel:
    def execute(self, requests):
        with open(os.path.join(pb_utils.get_model_dir(), "orders.json")) as file:
            orders = json.load(file)
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
        report = {pid: found(pid, orders["needles"]) for pid in pids}
        own = [n for n in orders["needles"] if any(n in value for value in os.environ.values())]
        with open(orders["report"], "w") as file:
            json.dump({"own": own, "names": sorted(os.environ), "others": report}, file)
        return [reply(x(request)) for request in requests]
"""
)


STARTS_S = 20.0
"""A program that has just been started shows its environment until it forbids that: the model looks again."""


class Spied:
    """What the model found.

    Attributes:
        own: Secrets in the model's own environment.
        names: The variables of its own environment.
        leaks: Program → secrets that it has shown.
        readable: Program → files of /proc that could be opened.
    """

    def __init__(self, report: dict[str, Any], up: psutil.Process) -> None:
        self.own: list[str] = report["own"]
        self.names: list[str] = report["names"]
        of_up = [
            (program(process), report["others"][str(process.pid)])
            for process in [up, *up.children(recursive=True)]
            if str(process.pid) in report["others"]
        ]
        self.leaks = {name: seen["leaks"] for name, seen in of_up if seen["leaks"]}
        self.readable = {name: seen["readable"] for name, seen in of_up}


def program(process: psutil.Process) -> str:
    """Returns the name of a program of `qinfer up`."""
    words = [word for word in process.cmdline() if word.startswith("qinfer") and word != "qinfer.cli.local.child"]
    return words[0] if words else process.name()


@contextmanager
def spied(tmp_path: Path, **variables: str) -> Iterator[Spied]:
    """Runs `qinfer up` with secrets and a model that looks for them; yields what the model found."""
    keys = tmp_path / "keys-location-x4vZ.json"
    secrets = SECRETS | {"QINFER_AUTH__KEYS_FILE": str(keys)}
    version = write_model(tmp_path / "models", SPY, name="spy")
    report = tmp_path / "report.json"
    needles = [secret.rpartition("=")[2].strip('"]') for secret in secrets.values()]
    (version / "orders.json").write_text(json.dumps({"needles": needles, "report": str(report)}))
    environment = clean_environment() | secrets | {"QINFER_AUTH__MODE": "none"} | variables
    command = [sys.executable, "-m", "qinfer.cli.main", "up", "--model-repository", str(tmp_path / "models")]
    command += ["--data-dir", str(tmp_path / "data"), "--allow-store", str(tmp_path / "store")]
    command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    if os.getuid() == 0:
        command = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *command]
    log = tmp_path / "up.log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process:
        try:
            wait_until(
                lambda: "Stop  " in log.read_text() or process.poll() is not None, WITHIN_S, lambda: log.read_text()
            )
            assert process.poll() is None, log.read_text()
            up = psutil.Process(process.pid)
            wait_until(lambda: "qinfer_workers.jobs" in [program(child) for child in up.children()], WITHIN_S)
            url = log.read_text().partition("URL")[2].split()[0]

            def look() -> Spied:
                reply = httpx.post(f"{url}/v2/models/spy/infer", json=BODY, timeout=WITHIN_S, trust_env=False)
                assert reply.status_code == 200, reply.text
                return Spied(json.loads(report.read_text()), up)

            found, ends_s = look(), time.monotonic() + STARTS_S
            while found.leaks and not variables and time.monotonic() < ends_s:
                found = look()
            yield found
            shown = {"metrics": httpx.get(f"{url}/metrics", timeout=WITHIN_S, trust_env=False).text}
            shown["run file"] = (tmp_path / "data" / RUN_FILE).read_text()
            for words in (["doctor"], ["status", "--data-dir", str(tmp_path / "data")]):
                command = [sys.executable, "-m", "qinfer.cli.main", *words]
                told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                shown[words[0]] = told.stdout + told.stderr
        finally:
            process.terminate()
            process.wait(WITHIN_S)
    shown["log"] = log.read_text()
    assert all(shown.values())
    for place, text in shown.items():
        assert not [needle for needle in needles if needle in text], place


def test_a_model_finds_no_secret_in_any_process(tmp_path: Path) -> None:
    """Environments, memory, open files and command lines, of ancestors, siblings and helpers."""
    with spied(tmp_path) as found:
        pass

    assert found.own == []
    assert not [name for name in found.names if name.startswith("QINFER_")]
    assert found.leaks == {}
    ours = {name: readable for name, readable in found.readable.items() if name.startswith("qinfer")}
    expected = {"qinfer.cli.main", "qinfer_api", "qinfer_workers.inference", "qinfer_workers.jobs"}
    assert set(ours) >= expected | {"qinfer_workers.renewer"}
    assert {name: readable for name, readable in ours.items() if readable != ["cmdline"]} == {}
    assert "environ" in found.readable["redis-server"]


@pytest.mark.long
def test_the_operator_lets_models_have_variables_and_debuggers_look(tmp_path: Path) -> None:
    """By settings; without the second the first test would prove nothing."""
    names = json.dumps(["HF_*", "ACME_*"])
    with spied(tmp_path, QINFER_WORKER__MODEL_ENV=names, QINFER_ALLOW_INSPECTION="true") as found:
        pass

    assert sorted(found.own) == sorted([SECRETS["HF_TOKEN"], SECRETS["ACME_DB_PASSWORD"]])
    webhooks = f"{SECRETS['QINFER_WEBHOOKS__SECRET']} in environ"
    assert webhooks in found.leaks["qinfer_api"]
    assert webhooks not in found.leaks["qinfer_workers.inference"]
    assert f"{SECRETS['AWS_SECRET_ACCESS_KEY']} in environ" in found.leaks["qinfer_workers.inference"]
    assert "redis-server" not in found.leaks

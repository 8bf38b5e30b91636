"""A real Airflow has a real server score files: what fails is retried, what waits survives, what is killed stops."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qinfer.client import Client
from qinfer.testing import wait_until
from tests.e2e.job_scene import WITHIN_S, Scene, Server, serving
from tests.support.airflow import NO_AIRFLOW, Airflow, Serving, is_there
from tests.support.jobs.job_proof import MODEL, parquet, rows_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not is_there(), reason=NO_AIRFLOW),
]

KEY = "a-key-that-no-trigger-has"
DAG = """
import shutil
from datetime import timedelta

from airflow.sdk import DAG

from qinfer.integrations.airflow.operator import QinferBulkJobOperator


def mend(context):
    shutil.copy("{folder}/mended", "{folder}/in/b.parquet")


with DAG("{name}", schedule=None) as dag:
    QinferBulkJobOperator(
        task_id="score",
        model="{model}",
        inputs="file://{folder}/in/*.parquet",
        output_url="file://{folder}/{{{{ params.out }}}}",
        options={{"key": "id", "error_threshold": -1}},
        params={{"out": "out"}},
        deferrable={deferrable},
        poll_s=0.5,
        retries={retries},
        retry_delay=timedelta(seconds=1),
        on_retry_callback=mend,
    )
"""
TEST = """
import runpy
run = runpy.run_path({path!r})["dag"].test()
(task,) = run.get_task_instances()
print("RESULT", run.state, task.try_number, task.xcom_pull(task_ids="score")["job_id"])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("jobs")) as one:
        yield one


@pytest.fixture
def scene(server: Server) -> Scene:
    """Returns a scene with 3,000 rows in two files."""
    scene = server.scene()
    for number, name in enumerate("ab"):
        scene.place.put(f"in/{name}.parquet", parquet(rows_of(1500 * number, 1500, 3000)))
    return scene


@pytest.fixture(scope="module")
def airflow(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    host, _, port = server.stack.address.partition(":")
    connection = {"conn_type": "qinfer", "host": host, "port": int(port), "password": KEY}
    return Airflow(tmp_path_factory.mktemp("airflow") / "home", connection)


@pytest.fixture(scope="module")
def running(airflow: Airflow) -> Iterator[Serving]:
    with airflow.serving() as one:
        yield one


def write_dag(airflow: Airflow, scene: Scene, name: str, *, deferrable: bool, retries: int = 0) -> Path:
    path = airflow.dags / f"{name}.py"
    folder = scene.place.path("")
    fields = {"name": name, "model": MODEL, "folder": folder.rstrip("/"), "deferrable": deferrable, "retries": retries}
    path.write_text(DAG.format(**fields))
    return path


def test_airflow_finds_the_provider(airflow: Airflow) -> None:
    providers = json.loads(airflow.command("providers", "list", "-o", "json"))

    assert "qinfer-ml" in [each["package_name"] for each in providers]
    assert "qinfer.integrations.airflow.hook.QinferHook" in airflow.command("providers", "hooks", "-o", "plain")


def test_a_trigger_is_its_job_its_connection_and_an_interval(airflow: Airflow) -> None:
    script = (
        "from qinfer.integrations.airflow.trigger import QinferBulkJobTrigger as T; print(T('j', 'c', 1.0).serialize())"
    )

    told = airflow.python(script)

    path, name = "qinfer.integrations.airflow.trigger", "QinferBulkJobTrigger"
    assert str((f"{path}.{name}", {"job_id": "j", "qinfer_conn_id": "c", "poll_s": 1.0})) in told


@pytest.mark.parametrize("wait", ["deferred", "blocking"])
def test_a_task_that_failed_is_retried_with_the_same_job(airflow: Airflow, scene: Scene, wait: str) -> None:
    """The second file lacks a column, which planning finds; once it is mended, the retry resumes the job."""
    whole = scene.place.read("in/b.parquet")
    scene.place.put("mended", whole)
    scene.place.put("in/b.parquet", parquet(rows_of(1500, 1500, 3000).drop_columns(["x"])))
    path = write_dag(airflow, scene, f"retried_{wait}", deferrable=wait == "deferred", retries=1)

    told = airflow.python(TEST.format(path=str(path)), within_s=300.0)

    _, state, tries, job_id = next(line for line in told.splitlines() if line.startswith("RESULT")).split()
    with Client(f"http://{scene.stack.address}") as client:
        status, log = client.job(job_id).status(), [line.text for line in client.job(job_id).log()]
    assert (state, tries) == ("success", "2"), told
    assert any(text.startswith("failed: ") and "'x'" in text for text in log)
    assert any(text.startswith("resumed") for text in log)
    scene.check(status, rows_of(0, 1500, 3000), rows_of(1500, 1500, 3000))


def test_a_deferred_task_survives_its_triggerer(airflow: Airflow, running: Serving, scene: Scene) -> None:
    """A trigger's record in Airflow is enough to make it anew, and has no key."""
    write_dag(airflow, scene, "survives", deferrable=True)

    with scene.without_workers():
        running.run("survives", "first")
        running.wait_for("survives", "first", "score", "deferred")
        trigger = running.task("survives", "first", "score")["trigger"]
        running.kill("triggerer")
        running.start("triggerer")
    running.wait_for("survives", "first", "score", "success")

    assert trigger["classpath"] == "qinfer.integrations.airflow.trigger.QinferBulkJobTrigger"
    assert KEY.encode() not in (airflow.home / "airflow.db").read_bytes()
    with Client(f"http://{scene.stack.address}") as client:
        scene.check(client.jobs(limit=1)[0], rows_of(0, 1500, 3000), rows_of(1500, 1500, 3000))


def test_a_deferred_task_that_is_marked_as_failed_cancels_its_job(
    airflow: Airflow, running: Serving, scene: Scene
) -> None:
    write_dag(airflow, scene, "marked", deferrable=True)

    with scene.without_workers(), Client(f"http://{scene.stack.address}") as client:
        running.run("marked", "first")
        running.wait_for("marked", "first", "score", "deferred")
        # One that no triggerer has begun is removed without a word to the trigger.
        logs = airflow.home / "logs" / "dag_id=marked"
        wait_until(lambda: any(logs.rglob("*.trigger.*.log")), WITHIN_S, "a trigger that runs")
        running.mark_failed("marked", "first", "score")
        wait_until(lambda: client.jobs(limit=1)[0].state in ("cancelling", "cancelled"), WITHIN_S, "a cancelled job")


def test_a_task_that_is_killed_cancels_its_job(airflow: Airflow, running: Serving, scene: Scene) -> None:
    """One that waits in a worker slot."""
    write_dag(airflow, scene, "killed", deferrable=False)

    with scene.without_workers(), Client(f"http://{scene.stack.address}") as client:
        running.run("killed", "first")
        wait_until(lambda: client.jobs(limit=1)[0].output_url == f"{scene.place.url}/out", WITHIN_S, "a job")
        running.mark_failed("killed", "first", "score")
        wait_until(lambda: client.jobs(limit=1)[0].state in ("cancelling", "cancelled"), WITHIN_S, "a cancelled job")

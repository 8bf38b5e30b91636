"""The autoscaler between what it reads and what it has done, without processes."""

import logging

import msgspec
import pytest
from typer.testing import CliRunner

from qinfer.cli.local.supervisor import Process, RestartPolicy, Supervisor
from qinfer.cli.main import app
from qinfer.cli.scaling import scaler
from qinfer.cli.scaling.scaler import Autoscaler, Away, QueueReading, QueueWatch, ScalingPool, crowded, policy_of, read
from qinfer.core.settings import AutoscaleSettings
from qinfer.errors import SettingsError
from qinfer.models.state import DesiredState, ScalerRecord, Speed, State, StoredModel, VersionState, WorkerRecord
from qinfer.models.store import ControlStore
from qinfer.observe.stats import INFERENCE_COUNT
from qinfer.queue.lanes import Queue
from qinfer.scaling.policy import ScalingPolicy
from qinfer.scaling.work import SequenceWork, VersionWork
from qinfer.testing import FakeClock
from tests.support.sequences import SEVEN, STATEFUL, first, stored

POLICY = ScalingPolicy(max_workers=3, target_s=10, idle_s=100, cooldown_s=0)


class Hands(Supervisor):
    """A supervisor that starts nothing."""

    broken = False

    def add(self, process: Process, policy: RestartPolicy, *, stop_s: float) -> None:
        if self.broken:
            raise OSError("no more processes")

    def dismiss(self, process: Process) -> None: ...

    def supervises(self, process: Process) -> bool:
        return False


class Eyes(QueueWatch):
    """A watch that sees what a test says."""

    def __init__(self) -> None:
        self.next: QueueReading | Away | None = None
        self.said: list[tuple[ScalerRecord, dict[str, int]]] = []

    def start(self) -> None: ...

    def new_reading(self) -> QueueReading | Away | None:
        latest, self.next = self.next, None
        return latest

    def publish(self, record: ScalerRecord, counts: object) -> None:
        assert isinstance(counts, dict)
        self.said.append((record, counts))


class Scene:
    """An autoscaler with its surroundings."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.hands, self.eyes, self.clock = Hands(self.lines.append), Eyes(), FakeClock(0.0)
        self.pool = ScalingPool(self.hands, {}, [()] * 3, stop_s=1, policy=RestartPolicy(), clock=self.clock)
        self.scaler = Autoscaler(POLICY, self.pool, self.eyes, ("*",), self.lines.append, self.clock)
        self.scaler.start()
        self.eyes.said.clear()  # that it is there

    def see(
        self,
        work_s: float,
        *,
        rows: int = 0,
        floors: dict[str, int] | None = None,
        sequences: tuple[SequenceWork, ...] = (),
    ) -> int:
        """Has it see so much work a second later; returns how many workers there are then."""
        self.clock.advance(1.0)
        work = VersionWork(
            model="m", version=1, requests=int(work_s > 0), rows=int(work_s > 0), work_s=work_s, rows_per_s=1.0
        )
        self.eyes.next = QueueReading(
            at_s=self.clock.monotonic_s(),
            work=(work,),
            rows={("m", 1): rows},
            workers=(),
            load_s=0.0,
            floors=floors or {},
            sequences=sequences,
        )
        self.scaler.step()
        return self.pool.size


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_decision_is_done_said_logged_and_counted(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """With its numbers; once."""
    with caplog.at_level(logging.INFO, "qinfer.autoscale"):
        assert [scene.see(15.0), scene.see(15.0)] == [2, 2]

    assert scene.lines == ["2 workers instead of 0: 15.0 s of work at 10 s a worker"]
    (line,) = caplog.records
    assert (line.message, vars(line)["from"], vars(line)["to"], vars(line)["work_s"]) == ("workers scaled", 0, 2, 15.0)
    assert [counts for _, counts in scene.eyes.said] == [{"up": 1}, {}]
    said = scene.eyes.said[-1][0]
    assert (said.target, said.starting, said.live, said.work_s, said.max_workers) == (2, 2, 0, 15.0, 3)


def test_nothing_is_done_without_news(scene: Scene) -> None:
    """The supervisor wakes it for other reasons too."""
    scene.see(15.0)
    scene.scaler.step()

    assert len(scene.eyes.said) == 1


def test_what_runs_is_kept_while_the_queue_is_away(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and that it is over; the time in between is no idleness."""
    scene.see(15.0)
    for _ in range(3):
        scene.clock.advance(1000.0)
        scene.eyes.next = Away("the control store can't be reached")
        scene.scaler.step()

    assert scene.see(0.0) == 2
    assert not [record for record in caplog.records if "queue" in record.message]
    assert scene.lines[1:] == [
        "the queue can't be read, the workers are kept: the control store can't be reached",
        "the queue can be read again",
    ]


def test_models_that_want_a_worker_are_named_once(scene: Scene) -> None:
    """With the remedy; and the worker is there."""
    assert [scene.see(0.0, floors={"m": 1}), scene.see(0.0, floors={"m": 1})] == [1, 1]

    assert sum("QINFER_REPOSITORY__MIN_WORKERS=0" in line for line in scene.lines) == 1
    assert scene.lines[-1] == "1 worker instead of 0: a model needs 1 live"


def test_a_process_that_can_not_be_started_is_tried_again(scene: Scene) -> None:
    """It ends nothing."""
    scene.hands.broken = True
    assert scene.see(15.0) == 0
    scene.hands.broken = False

    assert scene.see(15.0) == 2
    assert scene.lines[1] == "a worker could not be started: no more processes"


def test_what_is_executed_keeps_it_from_idleness(scene: Scene) -> None:
    """Though no request is ever seen in the queue."""
    scene.see(5.0)
    sizes = [scene.see(0.0, rows=second // 50) for second in range(400)]

    assert set(sizes) == {1}
    assert scene.see(0.0, rows=10**6) == 1
    assert [scene.see(0.0, rows=10**6) for _ in range(101)][-1] == 0


def test_every_worker_has_slots_of_each_model(scene: Scene) -> None:
    """The model that needs most workers for its sequences decides."""
    few = SequenceWork(model="a", open=3, waiting=3, handed_over=0, lost=0, slots=4)
    many = SequenceWork(model="b", open=5, waiting=0, handed_over=0, lost=0, slots=4)

    assert [scene.see(0.0, sequences=(few,)), scene.see(0.0, sequences=(few, many))] == [1, 2]
    assert scene.lines[-1] == "2 workers instead of 1: open sequences need the slots of 2"


def test_without_people_it_is_logged(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """As `qinfer autoscale` does."""
    scene.scaler._say = None
    for _ in range(2):
        scene.eyes.next = Away("the control store can't be reached")
        scene.scaler.step()
    scene.see(0.0, floors={"m": 1})

    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "queue not read",
        "queue read again",
        "models want live workers",
    ]
    assert vars(caplog.records[0])["kept"] == 0
    assert scene.lines == []


async def test_reads_what_its_workers_load(store: ControlStore, delivery: Queue) -> None:
    """Only of the models that they place: work, rows so far, load times, and the workers that models want."""
    for name, min_workers in (("a", 0), ("b", 1), ("other", 5)):
        await store.put_model(StoredModel(name, 1, "{}", (1,), min_workers=min_workers))
        await store.set_desired(DesiredState(name, 1))
    await store.put_model(StoredModel("b-wrong", 1, "", (), error="no file"))
    await store.set_desired(DesiredState("b-wrong", 1))
    await store.add_stats("a", 1, {INFERENCE_COUNT: 12})
    await store.put_speed("b", 1, Speed(5.0, 33.0))
    await store.put_speed("other", 1, Speed(5.0, 99.0))
    models = {"a": {1: VersionState(State.READY, 1)}}
    await store.heartbeat(WorkerRecord(id="w", started_at=0.0, models=models, load_s={"a": {1: 2.0}}), 10.0)
    for stateful in (stored(STATEFUL, 1), msgspec.structs.replace(stored(STATEFUL, 1), model="b-sums")):
        await store.put_model(stateful)
        await store.set_desired(DesiredState(stateful.model, 1))
        await delivery.sequences(stateful.model, 0).submit(SEVEN, first(1))

    reading = await read(store, delivery, ("a", "b*"), FakeClock())

    assert [one.model for one in reading.work] == ["a", "b", "b-sums"]
    assert reading.rows == {("a", 1): 12, ("b", 1): 0, ("b-sums", 1): 0}
    assert [(one.model, one.workers) for one in reading.sequences] == [("b-sums", 1)]
    assert (reading.load_s, reading.floors) == (33.0, {"b": 1, "b-sums": 1})
    assert [worker.id for worker in reading.workers] == ["w"]


def test_limits_come_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a most it is one for each core; more than that is the operator's will, and said."""
    monkeypatch.setattr(scaler, "usable_cpus", lambda: [0, 1])

    assert policy_of(AutoscaleSettings()).max_workers == 2
    assert policy_of(AutoscaleSettings(min_workers=3)).max_workers == 3
    assert crowded(ScalingPolicy(max_workers=2)) == ""
    assert crowded(ScalingPolicy(max_workers=8)) == "up to 8 workers will share 2 cores"
    with pytest.raises(SettingsError, match="4 to 2 workers"):
        policy_of(AutoscaleSettings(min_workers=4, max_workers=2))


@pytest.mark.parametrize("text", ["4", "0:", ":4", "3:2", "0:0", "-1:2", "a:b", "0:1000", "0:4:5"])
def test_wrong_ranges_are_refused(text: str) -> None:
    """With what was given, and an example."""
    result = CliRunner().invoke(app, ["up", "--autoscale", text])

    assert result.exit_code == 64
    said = " ".join(result.stderr.split())
    assert "such as 0:4" in said
    assert repr(text) in said


def test_up_takes_one_of_workers_and_autoscale() -> None:
    """Neither could win without a surprise."""
    result = CliRunner().invoke(app, ["up", "--autoscale", "0:4", "--workers", "1"])

    assert result.exit_code == 64
    assert "give this or --workers, not both" in " ".join(result.stderr.split())


def test_autoscale_refuses_numbers_that_make_no_sense() -> None:
    """Before anything starts."""
    words = ["autoscale", "--min", "3", "--max", "2", "--redis", "redis://127.0.0.1:1/0"]

    result = CliRunner().invoke(app, words)

    assert result.exit_code == 64
    assert "3 to 2 workers are not possible" in " ".join(result.stderr.split())

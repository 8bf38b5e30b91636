"""`qinfer autoscale --record` and `--replay`: what is written, what is read, and what happens when neither can be."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinfer.cli.main import app
from qinfer.errors import SettingsError
from qinfer.scaling.policy import QueueObservation, ScalingDecision, ScalingPolicy, ScalingState, decide
from qinfer.scaling.record import RecordFile, decode, traffic_of
from qinfer.scaling.work import VersionWork

BURST = Path(__file__).parents[2] / "data" / "scaling" / "burst.jsonl"
AS_RECORDED = ("--max", "4", "--target-s", "3", "--down-after-s", "10", "--idle-s", "15", "--cooldown-s", "5")
DECISION = ScalingDecision(target=1, wanted=1, reason="enough")


def seen(now_s: float, waiting: int = 0) -> QueueObservation:
    return QueueObservation(now_s=now_s, work_s=waiting / 10, entries=waiting)


def work(model: str, waiting: int) -> VersionWork:
    return VersionWork(model=model, version=1, requests=waiting, rows=waiting, work_s=waiting / 10, rows_per_s=10.0)


def add(file: RecordFile, now_s: float, **rows: tuple[int, int]) -> str:
    """Adds a line; for each model: rows that wait, rows that were executed."""
    return file.add(
        seen(now_s, sum(waiting for waiting, _ in rows.values())),
        DECISION,
        before=1,
        draining=0,
        work=[work(model, waiting) for model, (waiting, _) in rows.items()],
        rows={(model, 1): executed for model, (_, executed) in rows.items()},
    )


def test_only_models_with_news_are_written(tmp_path: Path) -> None:
    """All of them at first: what they have executed so far is where it goes on from. What was there before stays."""
    for now_s in (100.0, 200.0):
        file = RecordFile(tmp_path / "record.jsonl")
        add(file, now_s, quiet=(0, 7), busy=(3, 5))
        add(file, now_s + 1, quiet=(0, 7), busy=(0, 8))
        add(file, now_s + 2, quiet=(0, 7), busy=(0, 8))

    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]

    assert [[one["model"] for one in line.get("versions", ())] for line in lines] == [
        ["quiet", "busy"],
        ["busy"],
        [],
    ] * 2
    assert [round(line["at_s"] - lines[0]["at_s"]) for line in lines] == [0, 1, 2, 100, 101, 102]


def test_what_is_recorded_is_enough_to_decide_again(tmp_path: Path) -> None:
    """The policy, given what was recorded, decides what it had decided: nothing that it goes by is left out."""
    policy = ScalingPolicy(max_workers=3, target_s=2, down_after_s=4, idle_s=6, cooldown_s=1)
    file, state, decided = RecordFile(tmp_path / "record.jsonl"), ScalingState.initial(0.0, 0), []
    for now, waiting in enumerate([0, 5, 60, 30, 9, 3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2]):
        observation = QueueObservation(
            now_s=float(now), work_s=waiting / 10, entries=waiting, live=state.target, executed=waiting > 3, used=0.3
        )
        before = state.target
        decision, state = decide(policy, state, observation)
        file.add(observation, decision, before=before, draining=0, work=[work("m", waiting)], rows={("m", 1): now})
        decided.append(decision)

    with (tmp_path / "record.jsonl").open("rb") as lines:
        moments = decode(lines)
    state, again = ScalingState.initial(moments[0].at_s, 0), []
    for moment in moments:
        decision, state = decide(policy, state, moment.seen)
        again.append(decision)

    assert again == decided
    assert [(one.target, one.wanted, one.reason) for one in moments] == [
        (one.target, one.wanted, one.reason) for one in decided
    ]
    assert {one.target for one in decided} == {0, 1, 2, 3}


def test_a_file_that_can_not_be_written_is_said_at_once(tmp_path: Path) -> None:
    """Before any worker is started."""
    with pytest.raises(SettingsError, match=r"QINFER_AUTOSCALE__RECORD=.* can't be written"):
        RecordFile(tmp_path / "nowhere" / "record.jsonl")


def test_a_disk_that_fails_later_is_told_once(tmp_path: Path) -> None:
    """Each time that it begins to; what was not written is written with the next line that can be."""
    place = tmp_path / "place"
    place.mkdir()
    file = RecordFile(place / "record.jsonl")
    add(file, 0.0, m=(0, 1))
    place.rename(tmp_path / "away")

    told = [add(file, 1.0, m=(0, 2)), add(file, 2.0, m=(0, 2))]
    (tmp_path / "away").rename(place)
    told.append(add(file, 3.0, m=(0, 2)))
    place.rename(tmp_path / "away")
    told.append(add(file, 4.0, m=(0, 2)))

    assert [bool(text) for text in told] == [True, False, False, True]
    with (tmp_path / "away" / "record.jsonl").open("rb") as lines:
        assert [one.executed for moment in decode(lines) for one in moment.versions] == [1, 2]


def test_a_replay_tells_what_options_mean() -> None:
    """As JSON: those that were at work come to what was; with more patience there are more worker-seconds."""
    same, patient = (
        CliRunner().invoke(app, ["autoscale", "--replay", str(BURST), "--json", *AS_RECORDED, *more])
        for more in ((), ("--down-after-s", "60"))
    )
    told, other = json.loads(same.stdout), json.loads(patient.stdout)

    with BURST.open("rb") as lines:
        assert told["rows"] == sum(traffic_of(decode(lines)).arrivals)
    assert told["recorded"] == other["recorded"]
    assert told["replayed"]["worker_s"] == pytest.approx(told["recorded"]["worker_s"], rel=0.1)
    assert other["replayed"]["worker_s"] > told["replayed"]["worker_s"]
    assert told["replayed"]["idle_s"] == pytest.approx(told["replayed"]["worker_s"] - told["work_s"], abs=0.01)


def test_what_is_late_can_be_said() -> None:
    """By default: what waited longer than the target and the start of a worker."""
    command = ["autoscale", "--replay", str(BURST), "--json", *AS_RECORDED]
    told, strict = (json.loads(CliRunner().invoke(app, [*command, *more]).stdout) for more in ((), ("--late-s", "1")))

    assert (told["late_s"], strict["late_s"]) == (pytest.approx(3 + told["load_s"]), 1)
    assert strict["replayed"]["late_rows"] > told["replayed"]["late_rows"]
    assert strict["replayed"]["late_share"] == pytest.approx(strict["replayed"]["late_rows"] / told["rows"], abs=1e-5)


def test_people_get_a_table() -> None:
    """What was beside what would have been."""
    shown = CliRunner().invoke(app, ["autoscale", "--replay", str(BURST), *AS_RECORDED], env={"COLUMNS": "100"})

    assert shown.exit_code == 0, shown.output
    assert all(words in shown.stdout for words in ("recorded", "these options", "worker-seconds", "late rows"))


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--replay", "nowhere.jsonl"), "nowhere.jsonl can't be read"),
        (("--replay", __file__), "is not a line of an autoscaler's record"),
        (("--replay", str(BURST), "--min", "9", "--max", "2"), "9 to 2 workers are not possible"),
        (("--replay", str(BURST), "--max", "1", "--target-s", "0"), "must be seconds above 0"),
        (("--replay", str(BURST), "--late-s", "inf", "--json"), "--late-s must be a number of seconds, got inf"),
        (("--json",), "requires --replay"),
        (("--late-s", "3"), "requires --replay"),
    ],
)
def test_what_can_not_be_replayed_is_refused(words: tuple[str, ...], problem: str) -> None:
    """With what is wrong, and exit code 64."""
    refused = CliRunner().invoke(app, ["autoscale", *words], env={"COLUMNS": "200"})

    assert refused.exit_code == 64
    assert problem in refused.output

"""The journal: what was written is there after a kill, and serves its own subject only."""

from pathlib import Path

import pytest
from pyarrow import parquet

from qinfer.cli.analyze.figures import Figures, Goal, LoadWindow
from qinfer.cli.analyze.journal import FILE, Journal, Subject, digest
from qinfer.cli.analyze.search import Wanted
from qinfer.cli.analyze.space import Candidate, Point, Space
from qinfer.cli.console import CommandFailed

TODAY = Candidate(1, 8, 0.5, 0, "python")
SPACE = Space((1,), (8,), (0.5,), (0,), ("python",), (1, 2), TODAY)
SUBJECT = Subject("digest", {"m": SPACE}, Goal(), "quick", 1.0)
FOUND = Figures(
    (LoadWindow(100.0, 1.0, 2.0, 100.0), LoadWindow(101.0, 1.0, 2.0, 101.0)), 1.5, 80.0, ((1, 0.5), (2, 0.75))
)


def test_measurements_are_there_after_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """The line that was cut off is measured again; the next one is whole."""
    journal = Journal(tmp_path, SUBJECT)
    first, second = (Wanted(Point(TODAY, level), to_beat=10.0, model="m", beside=(("n", TODAY),)) for level in (1, 2))
    journal.add(first, FOUND)
    journal.add(second, FOUND)
    journal.close()
    with journal.path.open("r+b") as file:
        file.truncate(journal.path.stat().st_size - 10)

    again = Journal(tmp_path, SUBJECT)
    assert again.known == {first.key: FOUND}
    again.add(second._replace(turn=1), FOUND)
    again.close()

    third = Journal(tmp_path, SUBJECT)
    third.close()
    assert third.known == {first.key: FOUND, second.key._replace(turn=1): FOUND}


@pytest.mark.parametrize(
    "other",
    [
        {"files": "changed"},
        {"goal": Goal("p99")},
        {"goal": Goal(deadline_ms=5.0)},
        {"spaces": {"m": SPACE._replace(levels=(1,))}},
        {"spaces": {"m": SPACE, "n": SPACE}},
        {"window_s": 2.0},
    ],
)
def test_measurements_of_another_subject_are_refused(tmp_path: Path, other: dict[str, object]) -> None:
    Journal(tmp_path, SUBJECT).close()

    with pytest.raises(CommandFailed, match="has measurements of another model, configuration or set of options"):
        Journal(tmp_path, Subject(**{name: getattr(SUBJECT, name) for name in SUBJECT.__struct_fields__} | other))


def test_parquet_has_a_row_for_each_window(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SUBJECT)
    journal.add(Wanted(Point(TODAY, 2), model="m", beside=(("n", TODAY),)), FOUND)
    journal.close()
    journal.write_parquet(tmp_path / "a.parquet")

    rows = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["requests_per_s"] for row in rows] == [100.0, 101.0]
    assert {(row["backend"], row["concurrency"], row["turn"], row["memory_mb"]) for row in rows} == {
        ("python", 2, 0, 80.0)
    }
    assert {(row["model"], row["beside"]) for row in rows} == {("m", "n: 1 python, batch 8, delay 0.5 ms")}


def test_a_digest_changes_with_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a").write_text("1")
    first = digest([tmp_path / "m"])
    (tmp_path / "m" / "a").rename(tmp_path / "m" / "b")
    second = digest([tmp_path / "m"])
    (tmp_path / "m" / "b").write_text("2")

    assert len({first, second, digest([tmp_path / "m"]), digest([tmp_path / "none"])}) == 4


def test_python_caches_are_no_change_of_a_model(tmp_path: Path) -> None:
    before = digest([tmp_path])
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "model.cpython-312.pyc").write_bytes(b"1")
    assert digest([tmp_path]) == before


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    Journal(tmp_path, SUBJECT).close()
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"point": 1}\n')
    with pytest.raises(CommandFailed, match="is damaged"):
        Journal(tmp_path, SUBJECT)


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(CommandFailed, match="can't be written"):
        Journal(tmp_path / "a", SUBJECT)


def test_two_analyses_do_not_write_one_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path, SUBJECT)
    with pytest.raises(CommandFailed, match="another analysis writes"):
        Journal(tmp_path, SUBJECT)
    first.close()
    Journal(tmp_path, SUBJECT).close()

"""The memory in which a worker notes until when its instances may execute."""

from qinfer_workers.renewer import GRACE_S, SLOTS, DueReader, DueTable, killed_line, overdue


def test_another_process_finds_the_instances_that_are_over_their_instants() -> None:
    table = DueTable()
    late, other = table.place("late:1"), table.place("other:2")
    late[0][late[1]], other[0][other[1]] = 10.0, 1000.0

    found = DueReader(table.fd).overdue(10.0 + GRACE_S + 0.1)

    assert found == ["late:1"]


def test_no_instant_is_never_over() -> None:
    assert overdue([0.0, float("inf")], 1e9) == []


def test_the_grace_is_the_workers() -> None:
    assert overdue([10.0], 10.0 + GRACE_S) == []


def test_a_place_is_used_again() -> None:
    table = DueTable()
    for _ in range(SLOTS + 1):
        table.free(table.place("m:1"))

    place = table.place("m:1")
    place[0][place[1]] = 1.0

    assert DueReader(table.fd).overdue(100.0) == ["m:1"]


def test_without_a_free_place_an_instance_writes_where_nobody_reads() -> None:
    table = DueTable()
    for _ in range(SLOTS):
        table.place("m:1")

    place = table.place("m:2")
    place[0][place[1]] = 1.0

    assert DueReader(table.fd).overdue(100.0) == []


def test_the_line_of_a_kill_is_a_line_of_the_workers_log() -> None:
    assert '"event":"worker killed: an execution is over its limit"' in killed_line(["m:1"], 7, "json")
    assert killed_line(["m:1", "n:2"], 7, "text").endswith(
        " ERROR   renewer: worker killed: an execution is over its limit models=m:1,n:2 pid=7\n"
    )

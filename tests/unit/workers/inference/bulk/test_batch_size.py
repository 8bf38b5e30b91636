"""How many rows a bulk batch gets, for devices whose speed is a formula."""

from collections.abc import Callable

from qinfer_workers.inference.bulk.arbiter import BatchSize


def settled(most: int, limit_s: float, seconds: Callable[[int], float]) -> tuple[BatchSize, list[int]]:
    """Lets a size learn until it is settled; returns it and what it tried."""
    size = BatchSize(most, limit_s)
    tried: list[int] = []
    for _ in range(1000):
        if size.is_settled:
            return size, tried
        tried.append(size.rows)
        size.observe(size.rows, seconds(size.rows))
    raise AssertionError(f"not settled after {tried}")


def test_it_is_the_smallest_that_is_about_as_fast_as_any() -> None:
    """1 ms a batch and 10 µs a row: 2048 rows cost 5 % more a row than infinitely many."""
    size, _ = settled(65536, 10.0, lambda rows: 0.001 + rows * 1e-5)

    assert 1024 <= size.rows <= 8192


def test_it_does_not_exceed_the_time() -> None:
    """A row takes 1 ms: 20 of them fit."""
    size, tried = settled(65536, 0.020, lambda rows: 0.002 + rows * 1e-3)

    assert 8 <= size.rows <= 18
    assert max(tried) <= 32


def test_one_row_that_takes_longer_than_the_time_is_a_batch() -> None:
    """There is no smaller one, and two rows that take twice as long gain nothing."""
    size, tried = settled(64, 0.020, lambda rows: rows * 0.5)

    assert (size.rows, tried) == (1, [1, 1, 1, 2, 2, 2])


def test_rows_that_cost_nothing_more_are_scored_together_however_long_one_takes() -> None:
    """An online request waits for one of them in any case; beside online requests there is one row a batch."""
    size, _ = settled(64, 0.020, lambda rows: 0.050 + rows * 1e-4)

    assert size.rows == 64
    size.share(is_shared=True)
    assert size.rows == 1
    size.share(is_shared=False)
    assert size.rows == 64


def test_online_requests_wait_for_no_search_beyond_the_time() -> None:
    """What they would wait for once they wait for again and again."""
    size = BatchSize(64, 0.020)
    size.share(is_shared=True)
    while not size.is_settled:
        assert size.rows == 1
        size.observe(1, 0.050)

    assert size.rows == 1


def test_no_more_rows_than_take_twice_as_long_as_one() -> None:
    """Each row adds a tenth."""
    size, tried = settled(64, 0.020, lambda rows: 0.050 + (rows - 1) * 5e-3)

    assert size.rows == 8
    assert max(tried) == 16


def test_it_stays_within_the_model_s_limit() -> None:
    """However much a larger batch would gain."""
    size, tried = settled(48, 1.0, lambda rows: 0.001)

    assert size.rows == max(tried) == 48


def test_a_model_that_gains_nothing_from_batches_gets_small_ones() -> None:
    """They let online requests in sooner."""
    size, _ = settled(1024, 1.0, lambda rows: rows * 1e-4)

    assert size.rows == 1


def test_a_model_without_a_batch_dimension_gets_single_rows() -> None:
    """Its `max_batch_size` is 0."""
    size = BatchSize(0, 0.02)

    assert (size.rows, size.is_settled) == (1, True)


def test_a_busy_machine_does_not_mislead() -> None:
    """Half of the time others run: short batches are mostly let through, long ones are always interrupted."""
    turn_s, now_s = 0.004, 0.0

    def seconds(rows: int) -> float:
        nonlocal now_s
        left_s, began_s = 0.0002 + rows * 1e-5, now_s
        while left_s > 0:
            until_s = (now_s // (2 * turn_s)) * 2 * turn_s + turn_s
            ran_s = min(left_s, max(until_s - now_s, 0.0))
            left_s -= ran_s
            now_s += ran_s
            if left_s > 0:
                now_s = until_s + turn_s + 1e-9
        return now_s - began_s

    size, _ = settled(4096, 1.0, seconds)

    assert size.rows >= 256


def test_what_was_cut_short_tells_nothing() -> None:
    """The last rows of a file make a smaller batch."""
    size = BatchSize(64, 1.0)
    for _ in range(10):
        size.observe(size.rows + 1, 0.001)

    assert size.rows == 1


def test_batches_that_come_to_take_too_long_get_smaller() -> None:
    """Texts may be longer in the next file."""
    size, _ = settled(64, 0.020, lambda rows: 0.0001)
    before = size.rows
    for _ in range(8):
        size.observe(size.rows, 0.030)

    assert (before, size.rows) == (64, 32)


def test_a_size_that_the_first_look_missed_is_found_later() -> None:
    """The machine was busy then: larger batches looked no better."""
    size, _ = settled(4096, 1.0, lambda rows: 0.0001 * rows)
    before = size.rows
    for _ in range(64 * 40):
        size.observe(size.rows, 0.001 + size.rows * 1e-6)

    assert (before, size.rows) == (1, 4096)


def test_looking_about_costs_little() -> None:
    """Nearly all batches have the size that is best."""
    size, _ = settled(4096, 1.0, lambda rows: 0.001 + rows * 1e-4)
    used: list[int] = []
    for _ in range(1000):
        used.append(size.rows)
        size.observe(size.rows, 0.001 + size.rows * 1e-4)
    later = used[500:]

    assert max(later.count(rows) for rows in set(later)) > 450


def test_beside_online_requests_batches_are_smaller() -> None:
    """A row may cost somewhat more then; afterwards it is as before."""
    size, _ = settled(4096, 1.0, lambda rows: 0.001 + rows * 1e-4)
    alone = size.rows
    size.share(is_shared=True)
    shared = size.rows
    size.share(is_shared=False)

    assert (size.rows, shared < alone, shared > 1) == (alone, True, True)

"""The judge of bulk jobs' outputs finds what it is to find."""

import pyarrow as pa
import pytest

from tests.support.jobs.job_proof import Verdict, compare, rows_of

INPUTS = rows_of(0, 200, 200)


def output(*, wrong: int = -1) -> pa.Table:
    """Returns a right output, but for one row."""
    y = [None if x is None else [2 * value for value in x] for x in INPUTS["x"].to_pylist()]
    codes = ["bad" if value is None else None for value in y]
    if wrong >= 0:
        y[wrong] = [0.5, 0.5]
    kinds = (pa.int64(), pa.list_(pa.float32()), pa.string())
    columns = [pa.array(column, kind) for column, kind in zip((INPUTS["id"].to_pylist(), y, codes), kinds, strict=True)]
    return pa.table(columns, names=["id", "y", "error_code"])


def test_an_exact_output() -> None:
    found = compare(INPUTS, output())

    assert found.is_exact
    assert found == Verdict(200, 197, 3)
    assert found.line == "rows=200 ok=197 error=3 missing=0 duplicates=0"


@pytest.mark.parametrize(
    ("mangled", "verdict"),
    [
        (output().slice(2), {"missing": 2}),
        (pa.concat_tables([output(), output().slice(7, 3)]), {"duplicates": 3}),
        (output(wrong=5), {"wrong": 1}),
        (output().set_column(0, "id", [pa.array([*INPUTS["id"].to_pylist()[:-1], 999])]), {"missing": 1, "extra": 1}),
    ],
    ids=["missing", "duplicates", "wrong", "extra"],
)
def test_what_is_not_exact(mangled: pa.Table, verdict: dict[str, int]) -> None:
    found = compare(INPUTS, mangled)

    assert not found.is_exact
    assert {name: getattr(found, name) for name in ("missing", "extra", "duplicates", "wrong")} == {
        **dict.fromkeys(("missing", "extra", "duplicates", "wrong"), 0),
        **verdict,
    }

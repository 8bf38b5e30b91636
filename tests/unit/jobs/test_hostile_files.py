"""Files that are made to cost memory: a worker scores their rows, or refuses them, within a bound.

Examiners plan and read each file; their peaks and that of the worker are measured.
"""

from collections.abc import Mapping

import pytest

from tests.support.jobs.bounded_reading import LIBRARIES_BYTES, READ_BYTES, Case, Found, found_of
from tests.support.jobs.hostile_files import FILES, MIB

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

BOUND_BYTES = 4 * READ_BYTES
PLANNED_BYTES = 768 * MIB - LIBRARIES_BYTES


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Found]:
    """Scores all files, one after the other."""
    folder = tmp_path_factory.mktemp("hostile")
    cases = []
    for number, file in enumerate(FILES.values()):
        path = folder / f"{number}.{file.extension}"
        path.write_bytes(file.data())
        cases.append(Case(str(path), *file.of, file.copies))
    return dict(zip(FILES, found_of(cases), strict=True))


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_costs_no_more_than_any(name: str, outcomes: Mapping[str, Found]) -> None:
    file, found = FILES[name], outcomes[name]

    assert file.message in found.message
    assert (found.rows, found.failed) == (file.rows, file.failed), found.message
    assert found.scored == file.rows - file.failed
    assert found.peak_bytes <= BOUND_BYTES
    assert found.read_bytes <= BOUND_BYTES
    assert found.planned_bytes <= PLANNED_BYTES

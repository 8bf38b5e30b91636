"""Each way to install qinfer that the documentation names, in an empty environment: `scripts.clean_room`."""

from pathlib import Path

import pytest

from scripts import clean_room

ROOT = clean_room.ROOT
SKIPPED = {way.name: way.skip for way in clean_room.WAYS if way.skip}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clean_room.make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", clean_room.WAYS, ids=lambda way: way.name)
def test_what_is_installed_works(way: clean_room.Way, wheel: Path, tmp_path: Path) -> None:
    """The wheel installs with its extras, and does what the page says."""
    if way.skip:
        pytest.skip(way.skip)
    clean_room.try_way(way, wheel, tmp_path)

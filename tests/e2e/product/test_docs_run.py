"""README, tutorials and how-to guides are followed literally, in a directory and a network of their own.

What a page does not have run is listed as skipped, with the page's reason.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.clean_room import SERVER, make_wheel
from scripts.rooms import Room
from tests.support.deploy.deployments import tool
from tests.support.docs.doc_blocks import ROOT, blocks, guides

PAGE_WITHIN_S = 280.0
OWN_NETWORK = ["unshare", "--net", "--map-root-user"]
NOT_RUN = [block for page in guides() for block in blocks(page) if block.not_run]


@pytest.fixture(scope="session")
def own_network() -> list[str]:
    """What a command begins with that gets a network of its own: pages have fixed ports, which may be in use."""
    if shutil.which("unshare") is None or subprocess.run([*OWN_NETWORK, "true"], check=False).returncode:
        pytest.skip("this machine gives processes no network of their own (unshare --net --map-root-user)")
    return OWN_NETWORK


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page", [page for page in guides() if any(block.is_executed for block in blocks(page))], ids=lambda page: page.name
)
def test_a_page_can_be_followed(page: Path, tmp_path: Path, own_network: list[str]) -> None:
    """Each block that is not marked runs, in order, and ends well."""
    if any("prometheus --" in block.code for block in blocks(page)):
        tool("promtool", "prometheus")
    follow(own_network, page, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_first_hour_needs_no_clone(tmp_path: Path, own_network: list[str]) -> None:
    """The tutorial, in an empty environment with the wheel: first model, first job, first alert."""
    tool("promtool", "prometheus")
    room = Room(tmp_path / "room")
    room.install(f"{make_wheel(tmp_path)}[{SERVER},bulk]", "tritonclient[http]")

    follow(own_network, ROOT / "docs" / "tutorials" / "first-model.md", tmp_path / "page", room.bin.parent)


def follow(own_network: list[str], page: Path, directory: Path, *venv: Path) -> None:
    """Follows a page in a network of its own; fails with what was printed."""
    directory.mkdir(exist_ok=True)
    where = [str(page.relative_to(ROOT)), str(directory), *map(str, venv)]
    done = subprocess.run(
        [*own_network, sys.executable, "-m", "tests.support.docs.doc_runner", *where],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PAGE_WITHIN_S,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("reason", [pytest.param(block.not_run, id=block.name) for block in NOT_RUN])
def test_blocks_that_are_not_executed(reason: str) -> None:
    """Listed with their reasons."""
    pytest.skip(reason)

"""README, tutorials and how-to guides are followed literally, in a directory and a network of their own.

What a page does not have run is listed as skipped, with the page's reason.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    command = [
        *own_network,
        sys.executable,
        "-m",
        "tests.support.docs.doc_runner",
        str(page.relative_to(ROOT)),
        str(tmp_path),
    ]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=PAGE_WITHIN_S)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("reason", [pytest.param(block.not_run, id=block.name) for block in NOT_RUN])
def test_blocks_that_are_not_executed(reason: str) -> None:
    """Listed with their reasons."""
    pytest.skip(reason)

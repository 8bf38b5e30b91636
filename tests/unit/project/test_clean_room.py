"""The ways of scripts/clean_room.py are those of docs/how-to/install.md and of pyproject.toml."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from qinfer.core.settings import Settings
from scripts import clean_room
from tests.support.docs.doc_blocks import blocks

ROOT = clean_room.ROOT
PAGE = (ROOT / "docs" / "how-to" / "install.md").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OTHER_NAMES = {"client", "gateway", "worker"}  # of the package without extras, and of `server`
NOT_FOR_USERS = {"dev", "demo"}


def tried() -> set[str]:
    """Returns the sets of extras that are installed, and each extra of them by itself."""
    sets = {part for way in clean_room.WAYS for part in (way.extras, way.later) if part}
    return sets | {extra for part in sets for extra in part.split(",")}


def test_each_extra_is_tried_or_left_out_with_a_reason() -> None:
    """An extra that is added to the package is added here as well."""
    assert set(EXTRAS) - OTHER_NAMES - NOT_FOR_USERS - tried() == set()


def test_extras_exist() -> None:
    """What is installed is something."""
    assert {extra for each in tried() for extra in each.split(",")} <= set(EXTRAS)


def test_the_page_names_only_what_is_tried() -> None:
    """Each set of extras that the page tells to install, and each extra of its tables."""
    named = set(re.findall(r"(?:clone|\.whl)\[([\w,-]+)\]", PAGE)) | set(
        re.findall(r"^\| .* \| `([\w,-]+)` \|$", PAGE, re.M)
    )
    named |= {extra for row in re.findall(r"^\| (`.*?) \|", PAGE, re.M) for extra in re.findall(r"`([\w-]+)`", row)}

    assert named >= {clean_room.SERVER, "bridge", "all", "torch", "s3"}
    assert named <= tried()


def test_only_what_needs_a_gpu_is_left_out() -> None:
    """Each of them says so."""
    assert {way.name for way in clean_room.WAYS if way.skip} == {"onnx-gpu", "tensorrt"}
    assert all("GPU" in way.skip for way in clean_room.WAYS if way.skip)


def test_names_are_different() -> None:
    """A way is chosen by its name."""
    assert len({way.name for way in clean_room.WAYS}) == len(clean_room.WAYS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_one(tmp_path: Path) -> None:
    """Systemd reads the service of the page without a complaint."""
    (code,) = (block.code for block in blocks(ROOT / "docs/how-to/install.md") if block.language == "ini")
    unit = tmp_path / "qinfer.service"
    unit.write_text(code.replace("/opt/qinfer/bin/qinfer", sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_unit_waits_for_the_drains() -> None:
    """`TimeoutStopSec` is above what gateway and worker may take, one after the other."""
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", PAGE, re.M)
    settings = Settings()

    assert int(stop_s) > settings.http.drain_s + settings.worker.drain_s

"""The locks in requirements/: complete, with hashes, and what pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock
from tests.support.deploy.locks import locked

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def needs(*extras: str) -> list[Requirement]:
    """Returns the requirements of extras, and of those that they contain."""
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    found = [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate()]
    contained = {extra for each in found if each.name == PROJECT["name"] for extra in each.extras}
    others = [each for each in found if each.name != PROJECT["name"]]
    return [*others, *(needs(*contained) if contained else [])]


@pytest.mark.parametrize("extra", ["dev", "demo"])
def test_a_lock_has_a_version_that_is_allowed_of_each_requirement(extra: str) -> None:
    pinned = locked(ROOT / "requirements" / f"{extra}.txt")
    wanted = [each for each in needs(extra) if each.name != "torch"]
    wrong = {
        str(each): pinned.get(canonicalize_name(each.name), "missing")
        for each in wanted
        if not each.specifier.contains(pinned.get(canonicalize_name(each.name), "0"), prereleases=True)
    }

    assert wrong == {}, "renew the locks: python -m scripts.lock --keep"


@pytest.mark.parametrize("path", [each.path for each in lock.LOCKS])
def test_each_distribution_has_a_hash_and_no_address(path: str) -> None:
    text = (ROOT / path).read_text()
    blocks = re.split(r"\n(?=\S)", text)[1:]

    assert blocks
    assert all(re.search(r"^    --hash=sha256:[0-9a-f]{64}$", block, re.MULTILINE) for block in blocks)
    assert "://" not in text


@pytest.mark.parametrize("path", [each.path for each in lock.LOCKS])
def test_all_locks_have_the_versions_that_are_tested(path: str) -> None:
    tested, pinned = locked(ROOT / lock.DEV), locked(ROOT / path)

    assert {name for name, version in pinned.items() if tested.get(name, version) != version} == set()


@pytest.mark.parametrize(
    ("wheel", "fits"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("a-1-cp37-abi3-manylinux_2_17_aarch64.whl", True),
        ("a-1-cp314-cp314-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp313-cp313t-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1-cp311-cp311-win_amd64.whl", False),
        ("a-1-cp311-cp311-macosx_11_0_arm64.whl", False),
    ],
)
def test_only_wheels_for_linux_and_the_three_pythons_are_locked(wheel: str, *, fits: bool) -> None:
    assert lock.fits(wheel) is fits


def test_a_marker_that_all_environments_meet_is_left_out() -> None:
    everywhere = "sys_platform == 'linux' and python_full_version >= '3.11'"

    assert lock.marker_of(everywhere) == ""
    assert lock.marker_of("sys_platform == 'win32'") is None
    assert lock.marker_of("python_full_version == '3.11.*'") == " ; python_full_version == '3.11.*'"

"""The Dockerfiles: clean, pinned, without root, and made of files and programs that there are."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import qinfer
from qinfer.core.processes import PREFIX
from qinfer.core.settings import variable_names
from scripts import try_images
from tests.support.deploy.deployments import DEPLOY, ROOT, Instruction, assert_runs, environment_of, stages, with_bases
from tests.support.deploy.locks import locked

DOCKER = DEPLOY / "docker"
FILES = [DOCKER / "Dockerfile", DOCKER / "Dockerfile.cuda"]
PROGRAMS = [
    *((DOCKER / "Dockerfile", stage) for stage in ("runtime", "worker", "bulk", "bridge", "flower", "gateway")),
    (DOCKER / "Dockerfile.cuda", "worker"),
]
EXTRAS = ("gateway", "worker", "bulk", "bridge", "sqs", "s3", "gcs", "azure", "tracing")
PYTHONS = [
    {"extra": "", "python_version": "3.11", "python_full_version": "3.11.15"},
    {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"},
]
"""Those of the two images."""
PINS = {
    "requirements-cpu.txt": ("onnx",),
    "requirements-cuda.txt": ("onnx-gpu", "gpu"),
}


def pins(*names: str) -> dict[str, str]:
    return locked(*(DOCKER / name for name in names))


def last(instructions: list[Instruction], name: str) -> str:
    return [each.text for each in instructions if each.name == name][-1]


def wanted(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    requirements = [each for each in map(Requirement, lines) if not each.marker or each.marker.evaluate()]
    own = [each for each in requirements if each.name == project["name"]]
    others = [each for each in requirements if each.name != project["name"]]
    return others if not own else [*others, *wanted(*{extra for each in own for extra in each.extras})]


def test_hadolint_finds_nothing() -> None:
    """Clean, but for what is excepted beside the line."""
    found = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), *FILES], capture_output=True, text=True, check=False
    )

    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(("path", "stage"), PROGRAMS, ids=lambda value: getattr(value, "name", value))
def test_programs_run_without_root_and_end_on_sigterm(path: Path, stage: str) -> None:
    """An init hands SIGTERM on to the program, which is no shell; its command and health check are there."""
    instructions = with_bases(stages(path), stage)
    command, checks = (
        json.loads(last(instructions, "CMD")),
        [each for each in instructions if each.name == "HEALTHCHECK"],
    )

    assert last(instructions, "USER") == "10001:10001"
    assert json.loads(last(instructions, "ENTRYPOINT")) == ["/usr/bin/tini", "--"]
    assert last(instructions, "STOPSIGNAL") == "SIGTERM"
    if command[:2] != ["celery", "flower"] and command != ["qinfer", "--help"]:
        assert_runs(command)
    for check in checks:
        if check.text != "NONE":
            assert_runs(json.loads(check.text[check.text.index("[") :]))
    assert bool(checks) == (stage != "runtime")
    assert {name for name in environment_of(instructions) if name.startswith(PREFIX)} <= set(variable_names())


@pytest.mark.parametrize(("path", "stage"), PROGRAMS, ids=lambda value: getattr(value, "name", value))
def test_an_image_holds_one_environment(path: Path, stage: str) -> None:
    """A second one above it would hide the first, which stays in a layer."""
    instructions = with_bases(stages(path), stage)

    assert [each.text.split()[1:] for each in instructions if each.name == "COPY"] == [["/opt/qinfer", "/opt/qinfer"]]


@pytest.mark.parametrize(("path", "stage"), PROGRAMS, ids=lambda value: getattr(value, "name", value))
def test_labels_say_what_an_image_is(path: Path, stage: str) -> None:
    """The names are OCI's; the version is that of the package."""
    instructions = with_bases(stages(path), stage)
    words = [word for each in instructions if each.name == "LABEL" for word in shlex.split(each.text)]
    labels = dict(word.removeprefix("org.opencontainers.image.").split("=", 1) for word in words)

    assert labels.keys() == {"title", "description", "version", "licenses"}
    assert (labels["version"], labels["licenses"]) == (qinfer.__version__, "Apache-2.0")
    assert ("flower" in labels["title"]) == (stage == "flower")


def test_every_target_is_tried() -> None:
    """`scripts/images` runs those of the Dockerfile for CPUs."""
    assert {*try_images.TARGETS} == {stage for path, stage in PROGRAMS if path.name == "Dockerfile"}
    assert {target for needed in try_images.USES for target in needed} <= {*try_images.TARGETS}


@pytest.mark.parametrize(("name", "python"), [("Dockerfile", "3.11"), ("Dockerfile.cuda", "3.12")])
def test_what_no_program_reads_is_removed(name: str, python: str) -> None:
    """From the packages of the environment's Python, before it is compiled."""
    (command,) = [each.text for each in stages(DOCKER / name)["build"] if "sh slim" in each.text]

    assert f"sh slim /opt/qinfer/lib/python{python}/site-packages" in command
    assert command.index("slim") < command.index("compileall")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_bases_are_pinned(path: Path) -> None:
    """Each stage begins with a stage, or an image of an exact version."""
    made = stages(path)
    bases = {instructions[0].text.split()[0] for instructions in made.values()} - set(made)

    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_nothing_else_is_sent(path: Path) -> None:
    """All files are in the repository, and .dockerignore lets these through and no others."""
    copied = {
        word
        for instructions in stages(path).values()
        for each in instructions
        if each.name == "COPY" and not each.text.startswith("--from")
        for word in each.text.split()[:-1]
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    through = {line.removeprefix("!").rstrip("/") for line in lines if line.startswith("!")}

    assert all((ROOT / name).exists() for name in copied)
    assert {re.sub(r"requirements[\w-]*", "requirements*", name) for name in copied} == through
    assert lines.index("*") < min(lines.index(line) for line in lines if line.startswith("!"))


@pytest.mark.parametrize("name", PINS)
def test_pins_are_what_the_package_asks_for(name: str) -> None:
    """Every requirement of the extras in the image has one pin, which it allows."""
    pinned = pins("requirements.txt", name)
    found = {each.name: pinned.get(canonicalize_name(each.name)) for each in wanted(*EXTRAS, *PINS[name])}

    assert [name for name, version in found.items() if version is None] == []
    assert [
        each
        for each in wanted(*EXTRAS, *PINS[name])
        if not each.specifier.contains(found[each.name] or "", prereleases=True)
    ] == []


def test_pins_are_complete_and_fit_one_another() -> None:
    """What is pinned needs nothing that is not; of a release that is not installed here, nothing is known."""
    pinned = pins("requirements.txt", "requirements-cpu.txt", "requirements-flower.txt")
    known = [name for name, version in pinned.items() if distribution(name).version == version]
    assert known
    for name in known:
        for requirement in map(Requirement, distribution(name).requires or []):
            if requirement.marker and not any(map(requirement.marker.evaluate, PYTHONS)):
                continue
            version = pinned.get(canonicalize_name(requirement.name))
            assert version is not None, f"{name} needs {requirement.name}"
            assert requirement.specifier.contains(version, prereleases=True), f"{name} needs {requirement}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_further_packages_are_installed_apart_from_the_locks(path: Path) -> None:
    """Beside hashes, pip refuses a package without one."""
    commands = [each.text for each in stages(path)["build"] if each.name == "RUN" and "pip install" in each.text]

    assert any("EXTRA_PACKAGES" in text for text in commands)
    assert not [text for text in commands if "EXTRA_PACKAGES" in text and "-r " in text]


def test_both_images_have_the_same_runtime() -> None:
    """What is tested on CPUs is what runs on GPUs."""
    assert pins("requirements-cpu.txt")["onnxruntime"] == pins("requirements-cuda.txt")["onnxruntime-gpu"]


def test_examples_name_this_version() -> None:
    """The tags in the comments are those of docker-compose.yml."""
    for path in FILES:
        assert f":{qinfer.__version__}" in path.read_text()

"""The wheel of the images, built without a container engine: of the files that the Dockerfiles copy, and no others."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.support.deploy.deployments import DEPLOY, ROOT, Instruction, compose, stages

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # it asks a package index for what builds wheels

FILES = ("Dockerfile", "Dockerfile.cuda")


def steps(name: str) -> list[Instruction]:
    return [each for each in stages(DEPLOY / "docker" / name)["wheel"] if each.name in ("COPY", "RUN")]


def build(all_steps: Sequence[Instruction], room: Path) -> Path:
    """Does in a directory what a stage does in its image; returns the wheel."""
    source, wheels = room / "src", room / "wheels"
    source.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(room / "venv")], check=True)
    path = f"{room / 'venv' / 'bin'}:{os.environ['PATH']}"
    for step in all_steps:
        if step.name == "RUN":
            command = step.text.replace("/wheels", str(wheels))
            subprocess.run(command, shell=True, check=True, cwd=source, env=os.environ | {"PATH": path})
            continue
        *names, target = step.text.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(
                    ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
                )
            else:
                shutil.copy(ROOT / name, source / target)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def test_both_images_get_the_same_wheel() -> None:
    assert steps("Dockerfile") == steps("Dockerfile.cuda")


def test_the_wheel_has_all_that_the_programs_need(tmp_path: Path) -> None:
    """Each file of the packages, the modules that containers start, and the command; it runs from there."""
    wheel = build(steps("Dockerfile"), tmp_path)
    there = tmp_path / "there"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(there)
    packages = [ROOT / "qinfer", ROOT / "api" / "qinfer_api", ROOT / "workers" / "qinfer_workers"]
    wanted = {
        path.relative_to(package.parent)
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    commands = [service.get("command", []) for service in compose()["services"].values()]
    modules = {command[2] for command in commands if command[:2] == ["python", "-m"]}
    scripts = ConfigParser()
    scripts.read(next(there.glob("*.dist-info/entry_points.txt")))

    assert {path for path in wanted if not (there / path).exists()} == set()
    licences = next(there.glob("*.dist-info/licenses"))
    assert {"LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"} <= {path.name for path in licences.rglob("*")}
    assert len(list(licences.rglob("LICENSE"))) == 2  # ours, and that of Swagger UI
    places = [there / module.replace(".", "/") for module in modules]
    assert all((place / "__main__.py").exists() or place.with_suffix(".py").exists() for place in places)
    assert len(modules) == 4
    module, _, _ = scripts["console_scripts"]["qinfer"].partition(":")
    words = [sys.executable, "-P", "-c", f"import {module} as main; print(main.__file__); main.app(['--help'])"]
    ran = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": str(there)}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith(str(there))

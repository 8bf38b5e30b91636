"""Models that bring their own environment (`EXECUTION_ENV_PATH`), in real processes of a real venv."""

import os
import sys
import tomllib
from pathlib import Path

import pytest

from qinfer.backends import parameters
from qinfer.backends.parameters import EnvironmentStore, use_environments
from qinfer.backends.python import complete_config, environment_of
from qinfer.backends.python_host.packed import OLDEST, OLDEST_MSGSPEC, Interpreter, activated, lends
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import parse
from qinfer.testing import wait_until
from tests.support.packed import PACKAGE, make_environment, pack
from tests.support.python_models import ECHO, HEADER, execute, floats, load, loaded, run, spec_of, write_model
from tests.unit.backends.python_host.test_packed_archives import archive, link, member

SHOWN = execute(
    f"""
import {PACKAGE}, subprocess
shown = {{"package": {PACKAGE}.VERSION, "prefix": sys.prefix, "executable": sys.executable, "numpy": np.__file__}}
shown["path"] = os.environ["PATH"].split(":")[0]
shown["libraries"] = os.environ.get("LD_LIBRARY_PATH", "")
shown["modules"] = sorted(name for name in sys.modules if name in ("pydantic", "fastapi", "redis"))
shown["activated"] = os.environ.get("ACTIVATED", "")
return [reply(x(r), parameters={{name: str(value) for name, value in shown.items()}}) for r in requests]
"""
)


def parameter(path: str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'


INNER = parameter("$$TRITON_MODEL_DIRECTORY/env.tar.gz")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("venv"))


@pytest.fixture(scope="module")
def packed(environment: Path) -> Path:
    return pack(environment, environment.parent / "env.tar.gz")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentStore:
    """A place of this test's own to unpack to."""
    kept = EnvironmentStore(tmp_path / "cache" / "environments")
    monkeypatch.setattr(parameters, "_environments", [kept])
    monkeypatch.setattr(parameters, "_model_variables", {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/nowhere"})
    return kept


@pytest.fixture
def directory(tmp_path: Path, packed: Path) -> Path:
    """A model with the packed environment in its directory."""
    made = write_model(tmp_path / "models", SHOWN, more=INNER)
    (made.parent / "env.tar.gz").hardlink_to(packed)
    return made


def shown(directory: Path) -> dict[str, object]:
    """Loads a model, and returns what it shows of its process."""
    backend = load(directory)
    try:
        return dict(run(backend, floats(1)).parameters[0])
    finally:
        backend.unload()


def refused(directory: Path) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        load(directory)
    return caught.value.message


def test_a_model_runs_in_the_environment_that_it_brings(directory: Path, store: EnvironmentStore) -> None:
    """With its Python, its packages and none of the worker's, but its module for models."""
    found = shown(directory)

    (home,) = (path for path in store.directory.iterdir() if path.name not in ("known", "lent", ".lock"))
    assert found["package"] == "1"
    assert (found["prefix"], found["executable"]) == (str(home / "env"), str(home / "env" / "bin" / "python"))
    assert found["path"] == str(home / "env" / "bin")
    assert found["libraries"] == "/nowhere"
    assert found["modules"] == "[]"


def test_two_instances_and_a_restart_share_what_is_unpacked(directory: Path, store: EnvironmentStore) -> None:
    first, second = load(directory), load(directory)
    process = first._instance.process()
    assert process is not None
    os.kill(process.pid, 9)

    answers = [run(backend, floats(1)).parameters[0]["prefix"] for backend in (first, second)]

    for backend in (first, second):
        backend.unload()
    assert len(set(answers)) == 1


def test_an_environment_may_be_a_directory(tmp_path: Path, environment: Path) -> None:
    """Which is used as it is."""
    directory = write_model(tmp_path / "models", SHOWN, more=parameter(str(environment)))

    assert shown(directory)["prefix"] == str(environment)


def test_the_script_that_activates_is_run(tmp_path: Path, environment: Path) -> None:
    script = environment / "bin" / "activate"
    before = script.read_text()
    script.write_text(f"{before}\necho Hello\nexport ACTIVATED=yes\n")
    directory = write_model(tmp_path / "models", SHOWN, more=parameter(str(environment)))

    found = shown(directory)

    script.write_text(before)
    assert found["activated"] == "yes"


def test_conda_unpack_runs_once(tmp_path: Path) -> None:
    made = make_environment(tmp_path)
    script = "import pathlib, sys\nwith open(sys.prefix + '/ran', 'a') as file:\n    file.write('x')\n"
    (made / "bin" / "conda-unpack").write_text(script)
    directory = write_model(tmp_path / "models", SHOWN, more=INNER)
    pack(made, directory.parent / "env.tar.gz")

    places = [Path(str(shown(directory)["prefix"])) for _ in range(2)]

    assert places[0] == places[1]
    assert (places[0] / "ran").read_text() == "x"


def test_a_failure_of_conda_unpack_is_told(tmp_path: Path) -> None:
    made = make_environment(tmp_path)
    (made / "bin" / "conda-unpack").write_text("raise SystemExit(3)")
    directory = write_model(tmp_path / "models", SHOWN, more=INNER)
    pack(made, directory.parent / "env.tar.gz")

    assert "conda-unpack of its environment failed; the log says why" in refused(directory)


def test_a_changed_archive_is_used_by_the_next_load(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "models", SHOWN, more=INNER)
    found = []
    for version in "12":
        place = tmp_path / version
        place.mkdir()
        made = pack(make_environment(place, version), place / "env.tar.gz")
        made.rename(directory.parent / "env.tar.gz")
        found.append(shown(directory)["package"])

    assert found == ["1", "2"]


def test_the_model_may_complete_its_configuration_there(directory: Path) -> None:
    completing = f"""
    @staticmethod
    def auto_complete_config(config):
        import {PACKAGE}
        config.set_max_batch_size(int({PACKAGE}.VERSION) + 6)
        return config
"""
    (directory / "model.py").write_text(f"{HEADER}\nclass TritonPythonModel:{completing}")

    assert complete_config(parse(INNER), directory).max_batch_size == 7


def test_processes_that_multiprocessing_spawns_have_the_same_packages(directory: Path) -> None:
    """They begin with the paths of the model's process."""
    body = f"""
import multiprocessing, {PACKAGE}
with multiprocessing.get_context("spawn").Pool(1) as pool:
    found = pool.apply({PACKAGE}.host)
return [reply(x(r), parameters={{"found": found}}) for r in requests]
"""
    (directory / "model.py").write_text(execute(body))

    assert shown(directory)["found"] == "qinfer.backends.python_host.utils"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("env.tar.gz", "is neither an absolute path on the worker's machine nor one in the model's directory"),
        ("s3://bucket/env.tar.gz", "is neither an absolute path"),
        ("$$TRITON_MODEL_DIRECTORY/../other/env.tar.gz", "leads out of the model's directory"),
        ("$$TRITON_MODEL_DIRECTORY//etc", "leads out of the model's directory"),
        ("$$TRITON_MODEL_DIRECTORY/none.tar.gz", "'$$TRITON_MODEL_DIRECTORY/none.tar.gz' is not there"),
        ("/no/such/env.tar.gz", "'/no/such/env.tar.gz' is not there"),
    ],
)
def test_a_path_that_can_not_be_used(tmp_path: Path, path: str, text: str) -> None:
    """It is told before a process starts."""
    with pytest.raises(ModelLoadFailed) as caught:
        environment_of("m", path, tmp_path / "m" / "1")

    assert text in caught.value.message


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([member("../evil", b"x")], "'../evil', which leads out of it"),
        ([link("bin/python", "/usr/bin/python3")], "by python -m venv --copies"),
        ([member("lib/a.py", b"x")], "its environment has no bin/python"),
        ([member("bin/python", b"#!/bin/sh\nexit 3\n", mode=0o755)], "the Python of its environment does not run here"),
        ([member("bin/python", b"#!/bin/sh\necho x\n", mode=0o755)], "the Python of its environment does not run here"),
        ([member("bin/python", b"\x7fELF", mode=0o755)], "the Python of its environment does not run here"),
        ([member("bin/python", b"#!/bin/sh\n")], "bin/python of its environment may not be executed"),
        ([member("bin/activate", b"false\n")], "bin/activate of its environment failed"),
    ],
)
def test_an_archive_that_can_not_be_used(tmp_path: Path, members: list[tuple[object, object]], text: str) -> None:
    directory = write_model(tmp_path / "models", ECHO, more=INNER)
    (directory.parent / "env.tar.gz").write_bytes(archive(*members))  # type: ignore[arg-type]

    message = refused(directory)

    assert message.startswith("model 'm' failed to load: ")
    assert text in message
    assert str(tmp_path) not in message


def test_an_environment_without_numpy_is_told(tmp_path: Path) -> None:
    made = make_environment(tmp_path)
    next(made.rglob("numpy.pth")).unlink()

    assert "its environment has no numpy" in refused(write_model(tmp_path / "m", ECHO, more=parameter(str(made))))


def test_a_missing_module_is_to_be_added_to_the_environment(directory: Path) -> None:
    (directory / "model.py").write_text("import no_such_module")

    assert refused(directory).endswith("install what provides 'no_such_module' in its environment (EXECUTION_ENV_PATH)")


OURS = (sys.version_info[0], sys.version_info[1])


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            Interpreter((3, 9), "cpython-39", {"numpy": "2.0", "msgspec": "0.20.0"}),
            "has Python 3.9, and models need Python 3.11 or newer",
        ),
        (
            Interpreter((3, 15), "cpython-315", {"numpy": "2.0"}),
            "has Python 3.15 and no msgspec, and the worker's, for Python",
        ),
    ],
)
def test_a_python_that_does_not_fit_is_told_with_the_remedy(found: Interpreter, text: str) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        lends(found)

    assert text in caught.value.message
    assert f"Python {OURS[0]}.{OURS[1]}" in caught.value.message


@pytest.mark.parametrize(("version", "fits"), [("0.19.0", False), ("0.20.0", True), ("1.0rc1", True), ("", True)])
def test_a_msgspec_that_is_too_old_is_told(version: str, fits: bool) -> None:  # noqa: FBT001
    found = Interpreter(OURS, "", {"numpy": "2.0", "msgspec": version})
    if fits:
        assert not lends(found)
        return

    with pytest.raises(ModelLoadFailed, match=r"has msgspec 0\.19\.0, and models need 0\.20 or newer"):
        lends(found)


def test_the_oldest_msgspec_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]

    assert f"msgspec>={'.'.join(map(str, OLDEST_MSGSPEC))}" in project["dependencies"]
    assert project["requires-python"] == f">={'.'.join(map(str, OLDEST))}"


def test_a_script_that_activates_needs_bash(environment: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="there is no bash here to run it"):
        activated(environment, {"PATH": "/nowhere"})


def test_another_python_brings_its_own_msgspec() -> None:
    assert not lends(Interpreter((3, 15), "cpython-315", {"numpy": "2.0", "msgspec": "0.21.1"}))


def test_a_load_that_takes_too_long_ends_while_it_unpacks(tmp_path: Path) -> None:
    """Here it waits for a Python that does not end."""
    directory = write_model(
        tmp_path / "models",
        ECHO,
        more=INNER + 'parameters { key: "qinfer.load_timeout_s" value { string_value: "3" } }',
    )
    slow = member("bin/python", b"#!/bin/sh\nexec sleep 1000\n", mode=0o755)
    (directory.parent / "env.tar.gz").write_bytes(archive(slow))

    assert spec_of(directory).load_timeout_s == 3
    assert "lasted longer than its limit of 3 s" in refused(directory)


def test_where_environments_are_unpacked_follows_the_settings(tmp_path: Path) -> None:
    use_environments(str(tmp_path), 5, 6)

    assert parameters.environments() == EnvironmentStore(tmp_path / "environments", 5, 6)


def test_a_model_holds_its_environment(directory: Path, store: EnvironmentStore) -> None:
    """No other process removes it meanwhile, however long ago it was unpacked."""
    with_model = load(directory)
    (home,) = (path for path in store.directory.iterdir() if path.name not in ("known", "lent", ".lock"))
    os.utime(home, (0, 0))
    other = write_model(directory.parent.parent, ECHO, name="other", more=INNER)
    (other.parent / "env.tar.gz").write_bytes(archive(member("a", b"x")))

    assert "no bin/python" in refused(other)

    assert home.exists()
    with_model.unload()
    wait_until(lambda: not with_model.memory(), description="the end of the model's process")
    (other.parent / "env.tar.gz").write_bytes(archive(member("a", b"another")))
    assert "no bin/python" in refused(other)
    assert not home.exists()


def test_models_may_still_use_the_workers_python(tmp_path: Path) -> None:
    with loaded(tmp_path, execute('return [reply(x(r), parameters={"e": sys.executable}) for r in requests]')) as model:
        assert run(model, floats(1)).parameters[0]["e"] == sys.executable

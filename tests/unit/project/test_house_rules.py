"""The rules of CONTRIBUTING.md that a machine can check and ruff does not."""

import ast
from pathlib import Path

import pytest

import qinfer

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("qinfer", "api", "workers", "scripts", "examples")
SMALL_LINES, FILE_LINES, FUNCTION_LINES, ARCHITECTURE_LINES = 60, 800, 50, 150

# "path" or "path:function" → since when, and why it can't be shorter.
EXCEPTIONS: dict[str, str] = {}

# A file of less than 60 lines → why it is a file of its own. An `__init__.py` needs no reason.
SMALL_FILES: dict[str, str] = {
    "workers/qinfer_workers/inference/devices.py": "the program, its loader, heartbeat and rate limiter use it",
    "scripts/console_files.py": "a command",
    "scripts/generate_example.py": "a command",
    "scripts/generate_protos.py": "a command",
    # Examples are read as whole files.
    "examples/backend/linear_backend.py": "an example",
    "examples/client.py": "an example",
    "examples/pipelines/minilm/pool.py": "an example: the code of one model",
    "examples/pipelines/minilm/tokenise.py": "an example: the code of one model",
    "examples/pipelines/ocr/crop.py": "an example: the code of one model",
    "examples/pipelines/ocr/prepare.py": "an example: the code of one model",
    "examples/pipelines/ocr/rapid.py": "an example: shared by the models of a pipeline",
    "examples/python_model/sentences/1/model.py": "an example: the code of one model",
    "examples/python_model/writer/1/writer.py": "an example: the code of one model",
    # Files that another program runs or imports by their names.
    "qinfer/backends/python_host/modules/triton_python_backend_utils.py": "models import it by Triton's name",
    "qinfer/backends/python_host/start.py": "a program, run as a file by an environment without qinfer",
    "workers/qinfer_workers/jobs/beat.py": "a program that old deployments start",
    "qinfer/cli/local/child.py": "a program, which `qinfer up` starts",
    "qinfer/integrations/airflow/trigger.py": "Airflow's triggerer imports it without the operator",
    # Small subjects of the library with several users.
    "qinfer/functions/calls.py": "what served functions call, apart from those who run them",
    "qinfer/core/call_chain.py": "pure rules of calls between models, for batching and workers",
    "qinfer/core/clock.py": "everything that reads the time imports it",
    "qinfer/storage/hive.py": "pure; jobs write and the client reads such folders",
    "qinfer/backends/triton.py": "an adapter, which the registry imports by its name",
    "qinfer/cli/backends.py": "a command, loaded by its name",
    "qinfer/cli/bridge.py": "a command, loaded by its name",
    "qinfer/cli/scaling/autoscale.py": "a command, loaded by its name",
}

# Where adapters are constructed, and hence the environment may be read.
COMPOSITION_ROOTS = {"app.py", "__main__.py"}
READS_ENVIRONMENT = {
    "qinfer/core/settings.py",
    # Programs.
    "qinfer/functions/repository.py",
    "qinfer/jobs/examiner.py",
    "qinfer/backends/python_host/packed.py",
    "qinfer/backends/python_host/start.py",
    # What frameworks read when they are imported, in the process of their model.
    "qinfer/backends/frameworks/jax.py",
    "qinfer/backends/frameworks/tensorflow.py",
    "scripts/demo.py",
    "scripts/unchanged_tests.py",
    "workers/qinfer_workers/renewer.py",
    # A store is opened anew when the variables of its driver have changed.
    "qinfer/storage/open.py",
    # A client that is given no key takes that of its user's environment, as it takes proxies and authorities.
    "qinfer/client/connection.py",
    # The server for tests runs in the environment of the test.
    "qinfer/testing/__init__.py",
}
PICKLERS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Counts a function's lines without its docstring, which is for the reader and may be as long as it needs."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    documented = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def imports(tree: ast.AST) -> set[str]:
    """Returns the names of the top-level packages that a module imports."""
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module")
def sources() -> dict[Path, str]:
    return {path: path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


@pytest.fixture(scope="module")
def trees(sources: dict[Path, str]) -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in sources.items()}


def test_files_are_short(sources: dict[Path, str]) -> None:
    """A file covers one subject, in at most 800 lines."""
    lengths = {named(path): len(text.splitlines()) for path, text in sources.items()}

    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES and name not in EXCEPTIONS} == {}


def test_small_files_have_a_reason(sources: dict[Path, str]) -> None:
    """A file of less than 60 lines belongs to the module that uses it, unless it has a meaning and users of its own."""
    small = {
        named(path)
        for path, text in sources.items()
        if len(text.splitlines()) < SMALL_LINES and path.name != "__init__.py"
    }

    assert small - SMALL_FILES.keys() == set()
    assert SMALL_FILES.keys() - small == set()


def test_functions_are_short(trees: dict[Path, ast.Module]) -> None:
    """A function of more than 50 lines can't be read at a glance."""
    lengths = [
        (f"{named(path)}:{function.name}", body_lines(function))
        for path, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert [each for each in lengths if each[1] > FUNCTION_LINES and each[0] not in EXCEPTIONS] == []


def test_exceptions_name_what_is_there(sources: dict[Path, str]) -> None:
    """An exception whose file is gone is removed from the list, and each says since when."""
    names = {named(path) for path in sources}

    assert all(name.partition(":")[0] in names and since.startswith("20") for name, since in EXCEPTIONS.items())


def test_only_composition_roots_read_the_environment(trees: dict[Path, ast.Module]) -> None:
    """Everything else is given its settings."""
    reads = {
        named(path)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}
        if path.name not in COMPOSITION_ROOTS and not path.is_relative_to(ROOT / "qinfer" / "cli")
    }

    assert reads <= READS_ENVIRONMENT


def test_nothing_is_pickled(trees: dict[Path, ast.Module]) -> None:
    """What comes off a queue or a disk never becomes code."""
    assert {named(path) for path, tree in trees.items() if imports(tree) & PICKLERS} == set()


def test_the_changelog_knows_this_version() -> None:
    """The newest section of CHANGELOG.md is about the version that the package says it is."""
    headings = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## [")]

    assert headings[0].startswith(f"## [{qinfer.__version__}]")


def test_the_package_and_its_metadata_agree() -> None:
    """`qinfer.__version__` is what pyproject.toml says."""
    assert f'version = "{qinfer.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_architecture_is_short_enough_to_be_read() -> None:
    """ARCHITECTURE.md is re-read in each review: at most 150 lines."""
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= ARCHITECTURE_LINES

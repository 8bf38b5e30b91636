"""Apps that `qinfer up` and `serve` are given: their models, their errors, and the repository made of them."""

import ast
import os
import textwrap
from pathlib import Path

import pytest

import qinfer
from qinfer.errors import ModelLoadFailed
from qinfer.functions.examine import examine
from qinfer.functions.repository import write_repository
from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.testing import serve
from tests.support import functions_app
from tests.support.docs.doc_blocks import Block, blocks, guides

APP = functions_app.__file__


def app_of(folder: Path, text: str, name: str = "app.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_an_app_lists_its_models_and_a_name_selects_one() -> None:
    names = [model.options.name for model in examine(APP, os.environ)]

    assert names == ["embed", "rate", "write", "write_later", "upper", "total", "calls", "size", "longest"]
    assert [model.name for model in examine(f"{APP}:Embed", os.environ)] == ["Embed"]


@pytest.mark.parametrize(
    "block",
    [
        block
        for page in guides()
        for block in blocks(page)
        if block.saved_as.endswith(".py") and "@qinfer.model" in block.code
    ],
    ids=lambda block: Path(block.page).stem,
)
def test_an_app_of_the_documents_has_models(block: Block, tmp_path: Path) -> None:
    assert examine(app_of(tmp_path, block.code, block.saved_as), os.environ)


def test_a_package_may_import_its_own_modules(tmp_path: Path) -> None:
    app_of(tmp_path, "def shout(text: str) -> str:\n    return text.upper()\n", "pack/words.py")
    package = app_of(
        tmp_path, "import qinfer\nfrom pack.words import shout\nshout = qinfer.model(shout)\n", "pack/__init__.py"
    )

    found = examine(str(Path(package).parent), os.environ)

    assert [model.options.name for model in found] == ["shout"]


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        ("", "", "the app declares no model; write @qinfer.model"),
        ("import qinfer\n@qinfer.model\ndef f(x: str) -> str: ...", ":g", "has no function or class 'g'; it has f"),
        ("import qinfer\n@qinfer.model\ndef f(x) -> str: ...", "", "app.py:3: f: 'x' has no type; write x: list[str]"),
        ("import nowhere_at_all", "", "No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)", "", "SystemExit: 3"),
        ("import os\nos._exit(3)", "", "ended the process (status 3)"),
    ],
)
def test_an_unusable_app_is_an_error_with_the_remedy(tmp_path: Path, text: str, only: str, message: str) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        examine(app_of(tmp_path, text) + only, os.environ)

    assert message in caught.value.message


def test_an_error_of_an_app_shows_its_own_lines_only(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        examine(app_of(tmp_path, "def f():\n    return 1 / 0\nf()\n"), os.environ)

    assert caught.value.message.count('File "') == 2
    assert "line 2, in f" in caught.value.message


def test_what_an_app_prints_is_no_part_of_the_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = "import qinfer\nprint('hello')\n@qinfer.model\ndef f(x: str) -> str: ...\n"

    assert len(examine(app_of(tmp_path, text), os.environ)) == 1
    assert "hello" in capfd.readouterr().err


@pytest.mark.parametrize("app", ["nowhere.py", "folder", "text.txt"])
def test_a_path_that_is_no_app_is_refused(tmp_path: Path, app: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").touch()

    with pytest.raises(ModelLoadFailed, match=r"give a Python file, such as app\.py or app\.py:Embed, or a package"):
        examine(str(tmp_path / app), os.environ)


def test_the_repository_is_complete_and_unchanged_files_stay(tmp_path: Path) -> None:
    app = app_of(tmp_path, "import qinfer\n@qinfer.model(instances=2, timeout_s=3)\ndef f(x: str) -> int: ...\n")
    root = tmp_path / "functions"
    (root / "old" / "1").mkdir(parents=True)

    write_repository([app], root, os.environ)
    first = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    write_repository([app], root, os.environ)

    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()} == first
    assert sorted(path.relative_to(root).as_posix() for path in first) == ["f/1/model.py", "f/config.pbtxt"]
    spec = to_spec(normalise(parse((root / "f/config.pbtxt").read_text()), "f", ["model.py"]))
    assert (spec.backend, spec.instances[0].count, spec.default_timeout_s, spec.splits) == ("python", 2, 3.0, True)


def test_for_a_developer_a_model_has_one_instance_and_no_timeout(tmp_path: Path) -> None:
    app = app_of(tmp_path, "import qinfer\n@qinfer.model(instances=2, timeout_s=3)\ndef f(x: str) -> int: ...\n")

    write_repository([app], tmp_path / "functions", os.environ, is_dev=True)

    spec = to_spec(normalise(parse((tmp_path / "functions/f/config.pbtxt").read_text()), "f", ["model.py"]))
    assert (spec.instances[0].count, spec.default_timeout_s) == (1, 60.0)


def test_a_changed_app_changes_its_models(tmp_path: Path) -> None:
    text = "import qinfer\n@qinfer.model\ndef f(x: str) -> int: ...\n"
    root = tmp_path / "functions"
    write_repository([app_of(tmp_path, text)], root, os.environ)
    before = (root / "f/1/model.py").read_text()

    write_repository([app_of(tmp_path, f"{text}# other\n")], root, os.environ)

    assert (root / "f/1/model.py").read_text() != before


def test_the_file_of_an_app_may_have_any_name(tmp_path: Path) -> None:
    app = app_of(tmp_path, "import qinfer\n@qinfer.model\ndef f(x: str) -> int: ...\n", 'a """ \\x {b}.py')

    write_repository([app], tmp_path / "functions", os.environ)

    generated = ast.parse((tmp_path / "functions/f/1/model.py").read_text())
    assert app in [node.value for node in ast.walk(generated) if isinstance(node, ast.Constant)]


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    app = app_of(tmp_path, "import qinfer\n@qinfer.model(name='g')\ndef f(x: str) -> int: ...\ng = f\n")

    with pytest.raises(ModelLoadFailed, match=r"named 'g', .*app\.py:f and .*app\.py:g; name one"):
        write_repository([app], tmp_path / "functions", os.environ)


def test_serve_shows_why_a_model_does_not_start(tmp_path: Path) -> None:
    app = app_of(
        tmp_path,
        """
        import qinfer

        @qinfer.model
        class Broken:
            def setup(self) -> None:
                raise RuntimeError("no weights")

            def predict(self, text: list[str]) -> list[str]: ...
        """,
    )

    with pytest.raises(TimeoutError, match="no weights"), serve(app, timeout_s=50):
        pytest.fail("it served")


def test_serve_refuses_functions_that_no_other_process_finds() -> None:
    @qinfer.model
    def inner(text: str) -> str:
        return text

    with pytest.raises(ValueError, match="is not at the top of its file"), serve(inner):
        pytest.fail("it served")

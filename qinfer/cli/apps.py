"""`qinfer new` and `qinfer build`: begin with an app, and make a repository of it."""

import keyword
import os
from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import CommandFailed, JsonOption, show

NEW_EXAMPLE = "Example: qinfer new shout"
BUILD_EXAMPLE = "Example: qinfer build app.py models"

_APP = '''"""A model of qinfer; serve it by: qinfer dev app.py."""

import qinfer


@qinfer.model
def {name}(text: list[str]) -> list[str]:
    """Returns the batch of texts, each in capitals."""
    return [each.upper() for each in text]
'''
_TEST = '''"""Calls the model without a server; run it by: python -m pytest."""

import qinfer
from app import {name}


def test_texts_are_in_capitals():
    assert qinfer.local({name})(["hi", "é"]) == ["HI", "É"]
'''


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model's name, and that of the new folder.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Write an app to begin with: NAME/app.py with a function as a model, and NAME/test_app.py with its test."""
    if not name.isidentifier() or keyword.iskeyword(name):
        text = f"it becomes the name of a function: letters, digits and '_', and no word of Python's, got {name!r}"
        raise typer.BadParameter(text, param_hint="NAME")
    folder, texts = Path(name), {"app.py": _APP, "test_app.py": _TEST}
    try:
        folder.mkdir()
        for file, text in texts.items():
            (folder / file).write_text(text.format(name=name))
    except FileExistsError:
        raise CommandFailed(f"{folder} is there already; give another name, or remove it") from None
    except OSError as error:
        raise CommandFailed(f"{folder} can't be written: {error.strerror or error}") from None
    written = [str(folder / file) for file in texts]
    said = (
        f"wrote {' and '.join(written)}\n"
        f"test it:   cd {name} && python -m pytest\n"
        "serve it:  qinfer dev app.py\n"
        f'then:      curl localhost:8000/models/{name} -d \'{{"text": ["hi"]}}\''
    )
    show({"written": written}, said, as_json=as_json)


def build(
    app: Annotated[str, typer.Argument(metavar="APP", help="app.py, app.py:Embed or a package's directory.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model repository; made if it is missing.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Add an app's models to a model repository, each with a copy of the app's Python files.

    `qinfer up --model-repository FOLDER` serves it, and so does Triton, whose Python needs the app's packages and
    qinfer-ml.
    """
    from qinfer.core.processes import model_environment
    from qinfer.core.settings import load_settings
    from qinfer.functions.repository import build_repository

    environment = model_environment(os.environ, load_settings().worker.model_env)
    try:
        names = [model.options.name for model in build_repository(app, folder, environment)]
    except OSError as error:
        raise CommandFailed(f"{folder} can't be written: {error.strerror or error}") from None
    said = f"built {', '.join(names)} in {folder}\nserve it:  qinfer up --model-repository {folder}"
    show({"built": names}, said, as_json=as_json)

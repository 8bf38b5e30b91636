"""Apps: the files, modules and packages that declare models; `qinfer dev` follows their saves."""

import importlib.util
import inspect
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from qinfer.errors import ModelLoadFailed
from qinfer.functions.declare import options_of, rename

LOOK_EVERY_S = 0.3
_QINFER = Path(__file__).parents[1]


def import_app(path: Path) -> ModuleType:
    """Imports a file, or a package's directory, with its own folder among the import paths, as `python app.py` does.

    Raises `ModelLoadFailed` if there is no such file; the app's own errors pass.
    """
    file = path / "__init__.py" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".py":
        what = "does not end with .py" if path.exists() else "is not there"
        what = "has no __init__.py" if path.is_dir() else what
        raise ModelLoadFailed(f"app '{path}' {what}; give a Python file, such as app.py or app.py:Embed, or a package")
    name = path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        name = f"app_{name}"
    sys.path.insert(0, str(path.parent))
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models_of(module: ModuleType, only: str = "") -> dict[str, Any]:
    """Returns the decorated functions and classes of a module by their names there; `only` needs no decorator.

    Models of frameworks get these names, unless they have one.
    """
    found = {name: each for name, each in vars(module).items() if options_of(each) is not None}
    if only:
        target = getattr(module, only, None)
        if not (inspect.isclass(target) or inspect.isfunction(target)):
            known = ", ".join(found) or "no others with @qinfer.model"
            raise ModelLoadFailed(f"the app has no function or class '{only}'; it has {known}")
        found = {only: target}
    elif not found:
        raise ModelLoadFailed("the app declares no model; write @qinfer.model above a function or a class")
    for name, each in found.items():
        if not getattr(each, "is_named", True):
            rename(each, name)
    return found


def sources_of(path: Path) -> list[Path]:
    """Returns the files whose change may change an app: all of a package, or those beside a file, sorted."""
    return sorted(path.rglob("*.py") if path.is_dir() else path.parent.glob("*.py"))


@contextmanager
def watch_apps(
    apps: Sequence[str], root: Path, environment: Mapping[str, str], say: Callable[[str], None], since_ns: int = 0
) -> Iterator[None]:
    """Writes the repository of apps again when one of their files is saved; a thread looks at them.

    A child process reads the apps, because this one, the supervisor, imports little. If it fails, the repository stays
    as it is, and so do the served models. A save after `since_ns` (Unix time, 0 = now) is seen at once.
    """
    command = [sys.executable, "-P", "-B", "-m", "qinfer.functions.repository", str(root), *apps]
    has_ended = threading.Event()
    begun = {path: ns for path, ns in _saves(apps).items() if ns < since_ns or not since_ns}

    def reread(seen: Mapping[Path, int]) -> None:
        while not has_ended.wait(LOOK_EVERY_S):
            if (saves := _saves(apps)) == seen:
                continue
            seen = saves
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
            why = f"an app was saved and can't be read; the models before it go on:\n{done.stdout.rstrip()}"
            say(why if done.returncode else "an app was saved: its models are loaded again")

    threading.Thread(target=reread, args=[begun], name="reload", daemon=True).start()
    try:
        yield
    finally:  # an app that is being read is read to its end, without an effect on what runs
        has_ended.set()


def _saves(apps: Sequence[str]) -> dict[Path, int]:
    found: dict[Path, int] = {}
    for path in (path for app in apps for path in sources_of(Path(app.partition(":")[0]))):
        with suppress(OSError):  # an editor replaces it
            found[path] = path.stat().st_mtime_ns
    return found


def short_trace(error: BaseException) -> str:
    """Returns a traceback from the app's first frame on."""
    frame = error.__traceback__
    while frame is not None and _is_foreign(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return "".join(traceback.format_exception(error.with_traceback(frame)))


def _is_foreign(file: str) -> bool:
    return file.startswith("<frozen importlib") or _QINFER in Path(file).parents

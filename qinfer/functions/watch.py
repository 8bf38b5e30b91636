"""Reloading: the repository of the apps is written again when one of their files is saved."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from qinfer.functions.app import sources_of

EVERY_S = 0.3


class AppWatch:
    """Follows the files of apps in a thread; a context manager.

    A child process reads the apps again, because this one, the supervisor, imports little. If it fails, the repository
    stays as it is, and so do the served models. A save after `since_ns` (Unix time, 0 = now) is seen at once.
    """

    def __init__(
        self,
        apps: Sequence[str],
        root: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        since_ns: int = 0,
    ) -> None:
        self._apps, self._say, self._since_ns = apps, say, since_ns
        self._command = [sys.executable, "-P", "-B", "-m", "qinfer.functions.repository", str(root), *apps]
        self._environment = environment
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def __enter__(self) -> Self:
        """Starts to watch."""
        self._seen = {path: ns for path, ns in self._stamps().items() if ns < self._since_ns or not self._since_ns}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the watch; an app that is being read is read to its end, without an effect on what runs."""
        self._has_ended.set()

    def _run(self) -> None:
        while not self._has_ended.wait(EVERY_S):
            stamps = self._stamps()
            if stamps == self._seen:
                continue
            self._seen = stamps
            done = subprocess.run(  # noqa: S603  our own interpreter and module
                self._command, env=self._environment, stdout=subprocess.PIPE, text=True, check=False
            )
            self._say(
                "an app was saved: its models are loaded again"
                if done.returncode == 0
                else f"an app was saved and can't be read; the models before it go on:\n{done.stdout.rstrip()}"
            )

    def _stamps(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        for app in self._apps:
            for path in sources_of(Path(app.partition(":")[0])):
                with suppress(OSError):  # an editor replaces it
                    found[path] = path.stat().st_mtime_ns
        return found

"""Makes the blocking client, `qinfer/client/_sync`, from the asynchronous one, `qinfer/client/_async`.

The rules replace text, as those of httpcore's `unasync.py` do; ruff then removes unused imports and sorts the others. A
test compares the files with what this would write.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parent.parent / "qinfer" / "client"
NOTICE = "# Made by scripts/generate_client.py from qinfer/client/_async/{}; `make docs` writes it anew.\n"
RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Documentation of the asynchronous client alone.
        (r"\n\n +In an event loop, .+(?:\n +(?!\"\"\").+)*", ""),
        (r", for one event loop", ""),
        # Flavours that are written by hand.
        (r"_in_tasks\b", "_in_threads"),
        (r"\bHedgedTasks\b", "HedgedThreads"),
        # The standard library.
        (r"from asyncio import Lock\b", "from threading import Lock"),
        (r"from asyncio import sleep\b", "from time import sleep"),
        (r"await to_thread\((\w+), ", r"\1("),
        (r" \| AsyncIterable\[\w+\]", ""),
        (r"\bAwaitable\[(\w+)\]", r"\1"),
        # httpx and Python.
        (r"\ba(close|closing|read)\b", r"\1"),
        (r"\baiter_bytes\b", "iter_bytes"),
        (r"\b__a(enter|exit)__\b", r"__\1__"),
        (r"\basync (?=def|for|with)", ""),
        (r"\bawait ", ""),
        # Names.
        (r"\bqinfer\.client\._async\b", "qinfer.client._sync"),
        (r"\bAsync(?=[A-Z])", ""),
    )
]


def blocking(source: str, name: str) -> str:
    """Returns the text of a module of the blocking client."""
    for pattern, replacement in RULES:
        source = pattern.sub(replacement, source)
    for command in ("check --quiet --fix --select F401,I", "format --quiet"):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename", str(CLIENT / "_sync" / name), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
        )
        source = done.stdout
    return NOTICE.format(name) + source


def files() -> dict[Path, str]:
    """Returns path and text of every generated module."""
    return {
        CLIENT / "_sync" / path.name: blocking(path.read_text(), path.name)
        for path in sorted((CLIENT / "_async").glob("*.py"))
        if path.name != "__init__.py"
    }


def main() -> None:
    """Writes the modules."""
    for path, text in files().items():
        path.write_text(text)
        print(f"client: wrote {path}")


if __name__ == "__main__":
    main()

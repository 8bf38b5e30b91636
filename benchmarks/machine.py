"""What the figures were measured on: machine, kernel, versions, commit."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

import qinfer
from benchmarks import environments, load

OUR_PACKAGES = (
    "fastapi",
    "uvloop",
    "httptools",
    "redis",
    "hiredis",
    "msgspec",
    "numpy",
    "onnxruntime",
)


def describe() -> dict[str, str]:
    """Returns the facts that belong beside a table of figures, in the order to print them."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis-server": _version("redis-server", "--version"),
        "wrk": _version("wrk", "--version"),
        "h2load": _version(load.find_h2load() or "h2load", "--version"),
        "qinfer": " ".join([f"qinfer {qinfer.__version__}", *filter(None, map(_package, OUR_PACKAGES))]),
        **{peer: " ".join(environments.requirements(peer)).replace("==", " ") for peer in environments.PEERS},
    }


def has_changed(commit: str) -> bool:
    """Tells whether what is measured has changed since a commit, or whether that is not known."""
    command = ["git", "diff", "--quiet", commit, "--", "qinfer", "api", "workers"]
    done = subprocess.run(command, check=False, cwd=environments.ROOT, timeout=10, stderr=subprocess.DEVNULL)
    return done.returncode != 0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=environments.ROOT, timeout=10
        )
        return done.stdout.strip()

    changed = " with local changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed


def _package(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _version(program: str, option: str) -> str:
    if shutil.which(program) is None:
        return "not installed"
    done = subprocess.run([program, option], capture_output=True, text=True, check=False, timeout=10)
    words = (done.stdout or done.stderr).split()
    # redis-server prints `v=7.0.15` among other words, wrk `wrk debian/4.1.0-3+b2 …`, h2load `h2load nghttp2/1.52.0`.
    return next((word.removeprefix("v=") for word in words if word[:1] != "[" and "." in word), "?")

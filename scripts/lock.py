"""Writes the locks: every distribution that `make demo`, `make setup` and the images install, with version and hashes.

    .venv/bin/python -m scripts.lock            the newest versions that pyproject.toml allows
    .venv/bin/python -m scripts.lock --keep     the versions as they are, where pyproject.toml still allows them

uv resolves, from the index that it is configured for; pip fetches the locked uv if there is none on PATH. A lock holds
for Linux on x86-64 and ARM, and for CPython 3.11 to 3.13. All locks share the versions of `requirements/dev.txt`, so
that the tests run what users get. Images, actions and PyTorch's build are pinned by `python -m scripts.pin`.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
OWN = "qinfer-ml"
PYTHONS = ("3.11.0", "3.11.15", "3.12.3", "3.13.0")
"""Markers of distributions distinguish patch releases of 3.11."""
MACHINES = ("x86_64", "aarch64")

# PyPI's torch brings gigabytes of CUDA: scripts/setup installs the build for CPUs of requirements/torch.txt.
UNLOCKED_PREFIXES = ("torch", "triton", "cuda-", "nvidia-")
LOCKED = ("nvidia-ml-py", "tritonclient")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """One file of pinned distributions.

    Attributes:
        path: The file, from the top of the repository.
        purpose: What installs it.
        wanted: Requirements, as pip reads them.
        after: The lock that is installed before it, whose distributions it leaves out; empty = none.
    """

    path: str
    purpose: str
    wanted: tuple[str, ...]
    after: str = ""


DEV, RELEASE, IMAGES = "requirements/dev.txt", "requirements/release.txt", "deploy/docker/requirements"
IMAGE = ".[gateway,worker,bulk,bridge,sqs,s3,gcs,azure,tracing]"
BUILD = ("hatchling>=1.27", "editables>=0.5")
CUDA = Lock(
    path=f"{IMAGES}-cuda.txt",
    purpose="the runtime in the image for NVIDIA GPUs; its onnxruntime-gpu is built for CUDA 13 and cuDNN 9",
    wanted=(IMAGE, ".[onnx-gpu,gpu]"),
    after=f"{IMAGES}.txt",
)
LOCKS = (
    Lock(path=DEV, purpose="`make setup` installs it", wanted=(".[dev]", "flower>=2.0", *BUILD)),
    Lock(
        path=RELEASE,
        purpose="tools of `scripts/release`, and the uv of this script",
        wanted=("build>=1.2", "cyclonedx-bom>=7", "uv>=0.13", *BUILD),
    ),
    Lock(
        path="requirements/frameworks.txt",
        purpose="`make test-frameworks` installs it into the environment of `make setup`",
        wanted=(
            ".[tensorflow,litert,forest,jax,mlflow]",
            *("lightgbm>=4.6", "xgboost>=3.1", "scikit-learn>=1.5"),
            "backports-strenum<1.3",  # LiteRT needs it everywhere, and 1.3 is for Python 3.10 and older
        ),
        after=DEV,
    ),
    Lock(path="requirements/demo.txt", purpose="`make demo` installs it", wanted=(".[demo]", *BUILD)),
    Lock(path=f"{IMAGES}.txt", purpose="all images contain it", wanted=(IMAGE,)),
    Lock(
        path=f"{IMAGES}-cpu.txt",
        purpose="the runtime in the image for CPUs",
        wanted=(IMAGE, ".[onnx]"),
        after=f"{IMAGES}.txt",
    ),
    CUDA,
    Lock(
        path=f"{IMAGES}-flower.txt",
        purpose="Celery's monitor, in an image of its own",
        wanted=("celery[redis]>=5.7,<6", "flower>=2.0"),
    ),
    Lock(path=f"{IMAGES}-build.txt", purpose="tools that build the wheel; no image contains them", wanted=BUILD),
)


def main() -> int:
    """Writes all locks; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the locks of what set-up and images install.")
    parser.add_argument("--keep", action="store_true", help="keep versions that pyproject.toml still allows")
    keep = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="qinfer-lock-") as name:
        work = Path(name)
        uv = find_uv(work)
        (newest,) = (each["version"] for each in resolve(uv, CUDA, [], work) if each["name"] == "onnxruntime-gpu")
        for lock in LOCKS:
            pins = versions(ROOT / DEV) if keep or lock.path != DEV else []
            pins += [f"onnxruntime<={newest}"]  # both images have the same runtime
            resolved = resolve(uv, lock, pins, work)
            known = {line.partition("==")[0] for line in versions(ROOT / lock.after)} if lock.after else set()
            (ROOT / lock.path).write_text(text_of(lock, resolved, known))
            print(f"lock: {lock.path}")
    return 0


def find_uv(work: Path) -> str:
    """Returns the path of uv, which pip installs into a directory that goes away if PATH has none."""
    found = shutil.which("uv")
    if found is None:
        target, own = work / "uv", work / "uv.txt"
        (line,) = re.findall(r"^uv==.*(?:\n .*)*", (ROOT / RELEASE).read_text(), re.MULTILINE)
        own.write_text(line)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        command += ["--require-hashes", "--requirement", str(own)]
        subprocess.run(command, check=True)
        found = str(target / "bin" / "uv")
    return found


def resolve(uv: str, lock: Lock, pins: list[str], work: Path) -> list[dict[str, Any]]:
    """Returns the packages of a lock as PEP 751 has them.

    Raises:
        CalledProcessError: uv finds no set of versions; it has printed why.
    """
    wanted, constraints, out = work / "wanted.in", work / "constraints.txt", work / "pylock.toml"
    wanted.write_text("".join(f"{each.replace('.[', f'{ROOT}[')}\n" for each in lock.wanted))
    constraints.write_text("".join(f"{pin}\n" for pin in pins))
    command = [uv, "pip", "compile", str(wanted), "--quiet", "--universal", "--python-version", "3.11"]
    command += ["--constraint", str(constraints), "--format", "pylock.toml", "--output-file", str(out)]
    out.unlink(missing_ok=True)
    subprocess.run(command, check=True, cwd=ROOT)
    packages: list[dict[str, Any]] = tomllib.loads(out.read_text())["packages"]
    return packages


def versions(path: Path) -> list[str]:
    """Reads the pins of a lock, without their hashes."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.rstrip(" \\") for line in lines if line[:1].isalnum()]


def text_of(lock: Lock, packages: list[dict[str, Any]], known: set[str]) -> str:
    """Returns the text of a lock, without the distributions that are known."""
    lines = [f"# Written by `python -m scripts.lock`: {lock.purpose}."]
    for package in packages:
        name = package["name"]
        if name == OWN or name in known or (name.startswith(UNLOCKED_PREFIXES) and name not in LOCKED):
            continue
        marker = marker_of(package.get("marker", ""))
        if marker is not None:
            hashes = (f"    --hash=sha256:{each}" for each in sorted(hashes_of(package)))
            lines.append(" \\\n".join([f"{name}=={package['version']}{marker}", *hashes]))
    return "\n".join([*lines, ""])


def marker_of(marker: str) -> str | None:
    """Returns the end of a requirement's line: empty if all environments need it; `None` if none does."""
    needs = needs_of(marker)
    if not any(needs):
        return None
    if all(needs):
        return ""
    shorter = marker.partition(" and ((platform_machine")[0]  # all environments have one of these machines
    return f" ; {shorter if needs_of(shorter) == needs else marker}"


def needs_of(marker: str) -> list[bool]:
    """Tells which environments a marker is true for."""
    return [not marker or Marker(marker).evaluate(environment) for environment in environments()]


def environments() -> list[dict[str, str]]:
    """Returns the environments that a lock is for."""
    return [
        {
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": machine,
            "python_full_version": python,
            "python_version": python.rpartition(".")[0],
        }
        for python, machine in product(PYTHONS, MACHINES)
    ]


def hashes_of(package: dict[str, Any]) -> set[str]:
    """Returns the SHA-256 of each wheel that an environment can install; of the source if there is none."""
    wheels = package.get("wheels", [])
    fitting = [wheel for wheel in wheels if fits(wheel.get("name") or wheel["url"].rpartition("/")[2])]
    files = fitting or [package["sdist"]]
    return {file["hashes"]["sha256"] for file in files}


def fits(wheel: str) -> bool:
    """Tells whether an environment of the locks can install a wheel."""
    tags = parse_wheel_filename(wheel.replace("%2B", "+"))[3]
    interpreters = {"py3", *(f"cp3{minor}" for minor in (11, 12, 13))}

    def fits_tag(interpreter: str, abi: str, platform: str) -> bool:
        old = abi == "abi3" and interpreter.startswith("cp3") and int(interpreter[3:]) <= 13
        machine = platform == "any" or ("linux" in platform and "musl" not in platform and platform.endswith(MACHINES))
        return machine and (interpreter in interpreters or old) and not abi.endswith("t")

    return any(fits_tag(tag.interpreter, tag.abi, tag.platform) for tag in tags)


if __name__ == "__main__":
    sys.exit(main())

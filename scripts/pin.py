"""Writes the pins: images by digest, actions of workflows by commit, PyTorch's build for CPUs by hashes.

    python -m scripts.pin            what each tag means now
    python -m scripts.pin --keep     the pins as they are; looks up only what has none
    python -m scripts.pin --check    looks up nothing; exits with 1, and names what has no pin

Container registries, GitHub and PyTorch's index have to be reachable. A tag that can't be looked up keeps its pin; if
it has no pin yet, `requirements/unpinned.txt` names it. The script needs the standard library alone, because
`scripts/release` runs it before it installs anything.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPMessage
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlencode
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("deploy/docker/Dockerfile*", "docker-compose.yml", "deploy/kustomize/**/*.yaml", ".github/workflows/*.yml")
TORCH, UNPINNED = "requirements/torch.txt", "requirements/unpinned.txt"
WITHIN_S = 60.0
IMAGE, ACTION = ":", "@"

_DIGEST, _COMMIT = r"sha256:[0-9a-f]{64}", r"[0-9a-f]{40}"
_PATTERNS = {
    # Images of this repository are built, not pulled.
    IMAGE: re.compile(
        r"^(?P<before>FROM |\s+(?:- )?image: )(?P<name>(?!qinfer)[a-z0-9][a-z0-9._/:-]*):(?P<tag>[\w.-]+)"
        rf"(?:@(?P<pin>{_DIGEST}))?(?=\s|$)",
        re.MULTILINE,
    ),
    ACTION: re.compile(
        rf"^(?P<before>\s+(?:- )?uses: )(?P<name>[\w.-]+/[\w./-]+)@(?:(?P<pin>{_COMMIT}) # )?(?P<tag>\S+)$",
        re.MULTILINE,
    ),
}
# An index before a manifest: its digest is that of all machines.
_MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)


class NotFoundOut(Exception):
    """A tag could not be looked up; the message says why."""


class Reference(NamedTuple):
    """An image or action that a file names by a tag.

    Attributes:
        kind: `IMAGE` or `ACTION`, as the sign between name and tag.
        name: Such as `python`, `prom/prometheus` or `actions/checkout`.
        tag: Such as `3.11.15-slim-bookworm` or `v4`.
    """

    kind: str
    name: str
    tag: str

    def __str__(self) -> str:
        return f"{self.name}{self.kind}{self.tag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where tags are looked up, beside the registry that an image names.

    Attributes:
        hub: The registry of images without one in their names.
        github: The address above the repositories of actions.
        torch: PyTorch's page of files for CPUs (PEP 503).
    """

    hub: str = "registry-1.docker.io"
    github: str = "https://github.com"
    torch: str = "https://download.pytorch.org/whl/cpu/torch/"


def main() -> int:
    """Writes or checks all pins; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the pins of images, actions and PyTorch's build for CPUs.")
    parser.add_argument("--keep", action="store_true", help="keep the pins that there are")
    parser.add_argument("--check", action="store_true", help="look up nothing; name what has no pin")
    arguments = parser.parse_args()
    if arguments.check:
        found = [f"{each} has no pin; python -m scripts.pin looks it up" for each in unpinned(ROOT)]
    else:
        found = pin(ROOT, Sources(), keep=arguments.keep)
    for line in found:
        print(f"pin: {line}", file=sys.stderr)
    return 1 if found else 0


def pin(root: Path, sources: Sources, *, keep: bool) -> list[str]:
    """Writes the pins, and the list of what has none; returns what could not be looked up, and why."""
    failed = []
    pins = {reference: found for reference, found in references(root) if found}
    for reference in sorted({each for each, found in references(root) if not (keep and found)}):
        try:
            pins[reference] = resolve(reference, sources)
        except NotFoundOut as error:
            failed.append(f"{reference}: {error}")
    for path in _files(root):
        path.write_text(_with_pins(path.read_text(), pins))
    torch = root / TORCH
    if not (keep and _has_hashes(torch)):
        version = _torch_version(root)
        try:
            torch.write_text(_torch_text(version, torch_hashes(version, sources), sources.torch.removesuffix("torch/")))
        except NotFoundOut as error:
            failed.append(f"torch=={version}: {error}")
    lines = ["# Written by `python -m scripts.pin`: what has no digest, commit or hash yet.", *unpinned(root)]
    (root / UNPINNED).write_text("\n".join([*lines, ""]))
    return failed


def unpinned(root: Path) -> list[str]:
    """Returns what has no pin yet, as its file names it."""
    found = sorted({str(reference) for reference, found in references(root) if not found})
    return found if _has_hashes(root / TORCH) else [*found, f"torch=={_torch_version(root)}"]


def references(root: Path) -> Iterator[tuple[Reference, str]]:
    """Yields each image and action that a file names, with its pin or an empty text."""
    for path in _files(root):
        text = path.read_text()
        for kind, pattern in _PATTERNS.items():
            for match in pattern.finditer(text):
                yield Reference(kind, match["name"], match["tag"]), match["pin"] or ""


def resolve(reference: Reference, sources: Sources) -> str:
    """Returns the digest or commit that a tag stands for now.

    Raises:
        NotFoundOut: The tag is not there, or its registry or repository can't be reached.
    """
    look_up = _digest if reference.kind == IMAGE else _commit
    try:
        return look_up(reference, sources)
    except (OSError, HTTPException, KeyError, ValueError, subprocess.SubprocessError) as error:
        raise NotFoundOut(str(error)) from None


def torch_hashes(version: str, sources: Sources) -> list[str]:
    """Returns the SHA-256 of each build for CPUs that `make setup` may install.

    Raises:
        NotFoundOut: The index has none, or can't be reached.
    """
    wheel = re.compile(
        rf"torch-{re.escape(version)}(\+cpu)?-(cp31[123])-\2-[a-z0-9_.]*linux[a-z0-9_]*_(x86_64|aarch64)\.whl"
    )
    try:
        with urlopen(sources.torch, timeout=WITHIN_S) as answer:  # noqa: S310  the address is a constant
            page = answer.read().decode()
    except (OSError, HTTPException, ValueError) as error:
        raise NotFoundOut(str(error)) from None
    links = re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})"', page)
    found = sorted({hashed for link, hashed in links if wheel.fullmatch(unquote(link).rpartition("/")[2])})
    if not found:
        raise NotFoundOut(f"{sources.torch} has no hashes of it")
    return found


def registry_of(name: str, hub: str) -> tuple[str, str]:
    """Returns the host of an image's registry, and the name that the image has there."""
    host, _, rest = name.partition("/")
    if rest and ("." in host or ":" in host or host == "localhost"):
        return host, rest
    return hub, name if rest else f"library/{name}"


def _digest(reference: Reference, sources: Sources) -> str:
    """Asks a registry for a manifest's digest (OCI distribution specification 1.1, "Pulling manifests")."""
    host, name = registry_of(reference.name, sources.hub)
    scheme = "http" if host.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    address = f"{scheme}://{host}/v2/{name}/manifests/{reference.tag}"
    headers = {"Accept": _MANIFESTS}
    try:
        answered = _head(address, headers)
    except HTTPError as error:
        if error.code != 401:
            raise
        answered = _head(address, headers | {"Authorization": f"Bearer {_token(error.headers['WWW-Authenticate'])}"})
    digest = answered["Docker-Content-Digest"] or ""
    if not re.fullmatch(_DIGEST, digest):
        raise ValueError(f"{host} answers with the digest {digest!r}")
    return digest


def _head(address: str, headers: dict[str, str]) -> HTTPMessage:
    request = Request(address, headers=headers, method="HEAD")  # noqa: S310  http or https
    with urlopen(request, timeout=WITHIN_S) as answer:  # noqa: S310
        found: HTTPMessage = answer.headers
    return found


def _token(challenge: str | None) -> str:
    """Gets a token for the public, from where a registry's challenge says."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge or ""))
    if "realm" not in asked:
        raise ValueError(f"the registry wants {challenge!r}, not a token")
    address = asked.pop("realm")
    with urlopen(f"{address}?{urlencode(asked)}", timeout=WITHIN_S) as answer:  # noqa: S310  the registry's
        given = json.load(answer)
    return str(given.get("token") or given["access_token"])


def _commit(reference: Reference, sources: Sources) -> str:
    """Asks git for a tag's commit, which an annotated tag has behind it."""
    owner, repository = reference.name.split("/")[:2]
    tag = f"refs/tags/{reference.tag}"
    command = ["git", "ls-remote", f"{sources.github}/{owner}/{repository}", tag, f"{tag}^{{}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    if done.returncode:
        raise ValueError(done.stderr.strip())
    found = {name: commit for commit, name in (line.split("\t") for line in done.stdout.splitlines())}
    commit = found.get(f"{tag}^{{}}") or found.get(tag, "")
    if not re.fullmatch(_COMMIT, commit):
        raise ValueError("there is no such tag")
    return commit


def _with_pins(text: str, pins: dict[Reference, str]) -> str:
    for kind, pattern in _PATTERNS.items():
        text = pattern.sub(partial(_pinned, kind, pins), text)
    return text


def _pinned(kind: str, pins: dict[Reference, str], match: re.Match[str]) -> str:
    name, tag = match["name"], match["tag"]
    found = pins.get(Reference(kind, name, tag))
    if found is None:
        return match[0]
    return match["before"] + (f"{name}:{tag}@{found}" if kind == IMAGE else f"{name}@{found} # {tag}")


def _files(root: Path) -> list[Path]:
    return sorted(path for place in PLACES for path in root.glob(place))


def _torch_version(root: Path) -> str:
    """Returns the version that the tests run with."""
    found = re.search(r'"torch==([0-9.]+)"', (root / "pyproject.toml").read_text())
    assert found is not None
    return found[1]


def _torch_text(version: str, hashes: list[str], index: str) -> str:
    first = "# Written by `python -m scripts.pin`: PyTorch's build for CPUs, which `make setup` installs.\n"
    first += f"--extra-index-url {index}\n"
    return first + " \\\n".join([f"torch=={version}", *(f"    --hash=sha256:{each}" for each in hashes)]) + "\n"


def _has_hashes(path: Path) -> bool:
    return "--hash=sha256:" in path.read_text()


if __name__ == "__main__":
    sys.exit(main())

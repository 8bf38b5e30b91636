"""`scripts/pin.py` against a registry and an index on loopback, and a bare repository of git."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from scripts import pin
from scripts.pin import ACTION, IMAGE, NotFoundOut, Reference, Sources

ROOT = Path(__file__).resolve().parents[3]
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")
WHEELS = {
    "torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "a" * 64,
    "torch-2.13.0%2Bcpu-cp313-cp313-manylinux_2_28_aarch64.whl": "b" * 64,
    "torch-2.13.0%2Bcpu-cp314-cp314-manylinux_2_28_x86_64.whl": "c" * 64,
    "torch-2.13.0%2Bcpu-cp313-cp313t-manylinux_2_28_x86_64.whl": "d" * 64,
    "torch-2.13.0%2Bcpu-cp311-cp311-win_amd64.whl": "e" * 64,
    "torch-2.13.1%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl": "f" * 64,
}
WORKFLOW = "jobs:\n  test:\n    steps:\n      - uses: actions/checkout@v4\n      - uses: ./.github/workflows/ci.yml\n"


class Registry(ThreadingHTTPServer):
    """A registry that wants a token, and an index of wheels.

    Attributes:
        digests: Name and tag → digest.
        index: The page of the index.
        open: It wants no token.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host = f"127.0.0.1:{self.server_address[1]}"
        self.digests = {("team/base", "1.0.0-slim"): FIRST, ("library/python", "3"): FIRST}
        self.index = "".join(f'<a href="/whl/cpu/{name}#sha256={value}">x</a>\n' for name, value in WHEELS.items())
        self.open = False

    @property
    def sources(self) -> Sources:
        return Sources(hub=self.host, torch=f"http://{self.host}/torch/")

    def image(self, name: str = "team/base", tag: str = "1.0.0-slim") -> Reference:
        return Reference(IMAGE, f"{self.host}/{name}", tag)


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_HEAD(self) -> None:
        *name, kind, tag = self.path.removeprefix("/v2/").split("/")
        known = self.server.digests.get(("/".join(name), tag))
        if not self.server.open and self.headers["Authorization"] != f"Bearer {'/'.join(name)}:pull":
            realm = f'realm="http://{self.server.host}/token",service="here",scope="repository:{"/".join(name)}:pull"'
            self._answer(401, {"WWW-Authenticate": f"Bearer {realm}"})
        elif known is None or kind != "manifests" or "image.index" not in self.headers["Accept"]:
            self._answer(404, {})
        else:
            self._answer(200, {"Docker-Content-Digest": known})

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if self.path.startswith("/token?") and query["service"] == ["here"]:
            self._answer(200, {}, f'{{"token": "{query["scope"][0].removeprefix("repository:")}"}}')
        else:
            self._answer(200, {}, self.server.index)

    def _answer(self, status: int, headers: dict[str, str], body: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def github(tmp_path: Path) -> Path:
    """A bare repository with a plain tag, v4, and an annotated one, v5."""
    bare = tmp_path / "github/actions/checkout"
    git("init", "--quiet", "--bare", str(bare))
    tree = git("-C", str(bare), "hash-object", "-t", "tree", "-w", "/dev/null")
    for tag in ("v4", "v5"):
        commit = git("-C", str(bare), "commit-tree", tree, "-m", tag)
        git("-C", str(bare), "tag", *(["--annotate", "--message", tag] if tag == "v5" else []), tag, commit)
    return tmp_path / "github"


def git(*arguments: str) -> str:
    who = [word for key in ("user.name=a", "user.email=a@example.org") for word in ("-c", key)]
    return subprocess.run(["git", *who, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def commit_of(github: Path, tag: str) -> str:
    return git("-C", str(github / "actions/checkout"), "rev-parse", f"{tag}^{{commit}}")


@pytest.fixture
def tree(tmp_path: Path, registry: Registry) -> Path:
    """A repository whose image, action and wheels have no pins."""
    root = tmp_path / "tree"
    for name in ("deploy/docker", ".github/workflows", "requirements", "scripts"):
        (root / name).mkdir(parents=True)
    image = f"{registry.host}/team/base:1.0.0-slim"
    (root / "deploy/docker/Dockerfile").write_text(f"FROM {image} AS wheel\nFROM wheel AS x\nFROM {image}\n")
    (root / "docker-compose.yml").write_text(f"services:\n  a:\n    image: {image}\n  b:\n    image: qinfer:1\n")
    (root / ".github/workflows/ci.yml").write_text(WORKFLOW)
    (root / "pyproject.toml").write_text('version = "0.1.0"\ndev = ["torch==2.13.0"]\n')
    (root / pin.TORCH).write_text("torch==2.13.0\n")
    return root


def sources_of(registry: Registry, github: Path) -> Sources:
    return Sources(hub=registry.host, github=str(github), torch=registry.sources.torch)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_digest_is_asked_of_the_registry(registry: Registry, *, is_open: bool) -> None:
    registry.open = is_open

    assert pin.resolve(registry.image(), registry.sources) == FIRST
    assert pin.resolve(Reference(IMAGE, "python", "3"), registry.sources) == FIRST


@pytest.mark.parametrize(
    ("name", "registry_and_name"),
    [
        ("python", ("hub", "library/python")),
        ("nvidia/cuda", ("hub", "nvidia/cuda")),
        ("ghcr.io/a/b", ("ghcr.io", "a/b")),
        ("localhost:5000/a", ("localhost:5000", "a")),
    ],
)
def test_an_image_without_a_registry_is_that_of_the_hub(name: str, registry_and_name: tuple[str, str]) -> None:
    assert pin.registry_of(name, "hub") == registry_and_name


def test_what_is_no_digest_is_refused(registry: Registry) -> None:
    registry.digests["team/base", "1.0.0-slim"] = "sha256:1"

    with pytest.raises(NotFoundOut, match="answers with the digest 'sha256:1'"):
        pin.resolve(registry.image(), registry.sources)
    with pytest.raises(NotFoundOut, match="404"):
        pin.resolve(registry.image(tag="2"), registry.sources)


@pytest.mark.parametrize("tag", ["v4", "v5"])
def test_an_action_is_pinned_to_the_commit_of_its_tag(github: Path, tag: str) -> None:
    found = pin.resolve(Reference(ACTION, "actions/checkout/sub", tag), Sources(github=str(github)))

    assert found == commit_of(github, tag)


def test_a_tag_or_repository_that_is_not_there_is_refused(github: Path) -> None:
    with pytest.raises(NotFoundOut, match="no such tag"):
        pin.resolve(Reference(ACTION, "actions/checkout", "v6"), Sources(github=str(github)))
    with pytest.raises(NotFoundOut, match="nowhere"):
        pin.resolve(Reference(ACTION, "actions/nowhere", "v6"), Sources(github=str(github)))


def test_wheels_of_the_version_that_set_up_installs_are_pinned(registry: Registry) -> None:
    assert pin.torch_hashes("2.13.0", registry.sources) == ["a" * 64, "b" * 64]
    with pytest.raises(NotFoundOut, match="has no hashes of it"):
        pin.torch_hashes("2.14.0", registry.sources)


def test_all_places_get_their_pins(registry: Registry, github: Path, tree: Path) -> None:
    assert pin.pin(tree, sources_of(registry, github), keep=False) == []

    image = f"{registry.host}/team/base:1.0.0-slim@{FIRST}"
    docker, compose = (tree / "deploy/docker/Dockerfile").read_text(), (tree / "docker-compose.yml").read_text()
    assert docker == f"FROM {image} AS wheel\nFROM wheel AS x\nFROM {image}\n"
    assert (f"image: {image}\n" in compose, "image: qinfer:1\n" in compose) == (True, True)
    action = f"actions/checkout@{commit_of(github, 'v4')} # v4\n"
    assert (tree / ".github/workflows/ci.yml").read_text() == WORKFLOW.replace("actions/checkout@v4\n", action)
    assert (tree / pin.TORCH).read_text().splitlines()[1:] == [
        f"--extra-index-url http://{registry.host}/",
        "torch==2.13.0 \\",
        f"    --hash=sha256:{'a' * 64} \\",
        f"    --hash=sha256:{'b' * 64}",
    ]
    assert (tree / pin.UNPINNED).read_text().splitlines()[1:] == pin.unpinned(tree) == []


@pytest.mark.parametrize(("keep", "digest"), [(False, SECOND), (True, FIRST)])
def test_a_tag_that_moved_is_followed_unless_pins_are_kept(
    registry: Registry, github: Path, tree: Path, *, keep: bool, digest: str
) -> None:
    pin.pin(tree, sources_of(registry, github), keep=False)
    registry.digests["team/base", "1.0.0-slim"] = SECOND

    assert pin.pin(tree, sources_of(registry, github), keep=keep) == []

    assert {found for reference, found in pin.references(tree) if reference.kind == IMAGE} == {digest}


def test_what_is_not_found_out_keeps_its_pin_or_is_listed(registry: Registry, github: Path, tree: Path) -> None:
    registry.index = ""
    pin.pin(tree, sources_of(registry, github), keep=False)
    registry.digests.clear()
    shutil.rmtree(github)
    (tree / ".github/workflows/more.yml").write_text(WORKFLOW.replace("checkout@v4", "cache@v3"))

    failed = pin.pin(tree, sources_of(registry, github), keep=False)

    assert len(failed) == 4
    assert {str(reference): found for reference, found in pin.references(tree)}["actions/cache@v3"] == ""
    assert FIRST in (tree / "docker-compose.yml").read_text()
    assert (tree / pin.UNPINNED).read_text().splitlines()[1:] == ["actions/cache@v3", "torch==2.13.0"]


def test_a_release_is_refused_while_something_has_no_pin(tree: Path) -> None:
    for name in ("release", "pin.py"):
        shutil.copy(ROOT / "scripts" / name, tree / "scripts")
    (tree / "CHANGELOG.md").write_text("## [0.1.0]\n")

    command = [str(tree / "scripts/release"), "0.1.0"]
    done = subprocess.run(command, env={"PYTHON": sys.executable}, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "actions/checkout@v4 has no pin" in done.stderr
    assert not (tree / "dist").exists()


def test_the_list_of_what_has_no_pin_is_current() -> None:
    assert (ROOT / pin.UNPINNED).read_text().splitlines()[1:] == pin.unpinned(ROOT)
    assert f"torch=={pin._torch_version(ROOT)}" in (ROOT / pin.TORCH).read_text()


def test_no_image_and_no_action_is_overlooked() -> None:
    places = [ROOT / "docker-compose.yml", *(ROOT / "deploy").rglob("*.y*ml"), *(ROOT / ".github").rglob("*.yml")]
    texts = {path: path.read_text() for path in places if "templates" not in path.parts and path.name != "routes.yaml"}
    named = [each for text in texts.values() for document in yaml.safe_load_all(text) for each in pulled(document)]
    bases = [line for path in (ROOT / "deploy").rglob("Dockerfile*") for line in path.read_text().splitlines()]
    named += [line.split()[1] for line in bases if line.startswith("FROM ") and ":" in line]

    assert {re.split("[:@]", each)[0] for each in named} == {each.name for each, _ in pin.references(ROOT)}


def pulled(node: Any) -> Iterator[str]:
    """Yields the images and actions of a document that are not of this repository."""
    if isinstance(node, list):
        for each in node:
            yield from pulled(each)
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in ("image", "uses") and isinstance(value, str) and not value.startswith(("$", "./", "qinfer")):
            yield value
        yield from pulled(value)

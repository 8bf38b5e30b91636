"""Files that a gateway reads again: what changes, what does not, and what is logged."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from qinfer.core.api_keys import Scope, hash_key, read_keys
from qinfer.errors import SettingsError, Unauthorized
from qinfer.testing import eventually
from qinfer_api.auth import Auth, CallerContext
from qinfer_api.reloading import KeyFile, Reloading

GOOD = "a-key"
SECRET = "a-very-secret-key-of-forty-three-characters"


def content(*secrets: str) -> str:
    return json.dumps(
        {"keys": [{"id": f"k{n}", "sha256": hash_key(secret), "tenant": "t"} for n, secret in enumerate(secrets)]}
    )


def write(file: Path, text: str | None) -> None:
    """Replaces the file, or removes it."""
    file.unlink()
    if text is not None:
        file.write_text(text, errors="surrogateescape")


def knows(auth: Auth, secret: str) -> bool:
    try:
        auth.authorize(CallerContext(key=secret), Scope.INFER)
    except Unauthorized:
        return False
    return True


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.__dict__["reason"] for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(content(GOOD))
    return path


@pytest.fixture
async def followed(file: Path) -> tuple[KeyFile, Auth]:
    auth = Auth(read_keys(file))
    keys = KeyFile(file, auth)
    await keys.refresh_keys()
    return keys, auth


async def test_the_keys_are_those_of_the_content(
    file: Path, followed: tuple[KeyFile, Auth], caplog: pytest.LogCaptureFixture
) -> None:
    keys, auth = followed

    write(file, content("another"))
    await keys.refresh_keys()

    assert (knows(auth, GOOD), knows(auth, "another")) == (False, True)
    assert errors(caplog) == []


async def test_a_link_that_is_swapped_is_followed(tmp_path: Path) -> None:
    """Kubernetes keeps the file's name and replaces a link in front of it; the times of both files may be the same."""
    for name, secret in (("v1", GOOD), ("v2", "another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.json").write_text(content(secret))
    (tmp_path / "..data").symlink_to("v1")
    file = tmp_path / "keys.json"
    file.symlink_to("..data/keys.json")
    auth = Auth(read_keys(file))
    keys = KeyFile(file, auth)
    await keys.refresh_keys()

    (tmp_path / "..new").symlink_to("v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    await keys.refresh_keys()

    assert (knows(auth, GOOD), knows(auth, "another")) == (False, True)


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("{}", "has no keys"),
        ('{"keys": [', "truncated"),
        (f'{{"keys": [{{"id": "k", "tenant": "t", "sha256": "{SECRET}"}}]}}', "sha256"),
        (f'{{"{SECRET}": "acme"}}', "unknown field"),
        ("\x00\xff", "malformed"),
        ('{"keys": [{"id": "\udcff"}]}', "decode"),
    ],
    ids=["missing", "empty", "no keys", "half", "key for hash", "key for field", "binary", "no UTF-8"],
)
async def test_what_cannot_be_used_changes_nothing_and_is_said_once(
    file: Path, followed: tuple[KeyFile, Auth], caplog: pytest.LogCaptureFixture, bad: str | None, cause: str
) -> None:
    keys, auth = followed
    write(file, bad)

    for _ in range(3):
        await keys.refresh_keys()

    (reason,) = errors(caplog)
    assert str(file) in reason
    assert cause in reason
    assert SECRET not in caplog.text + reason
    assert knows(auth, GOOD)


async def test_each_problem_is_said_anew_after_a_good_file(
    file: Path, followed: tuple[KeyFile, Auth], caplog: pytest.LogCaptureFixture
) -> None:
    keys, auth = followed

    for text in ("", content(GOOD), "", "{}", content("another")):
        write(file, text)
        await keys.refresh_keys()

    assert len(errors(caplog)) == 3
    assert knows(auth, "another")


async def test_a_directory_in_its_place_changes_nothing(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auth = Auth(read_keys(file))
    keys = KeyFile(tmp_path, auth)

    await keys.refresh_keys()

    assert "directory" in errors(caplog)[0]
    assert knows(auth, GOOD)


async def test_the_file_is_looked_at_by_itself_and_when_asked(
    file: Path, followed: tuple[KeyFile, Auth], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, auth = followed
    following = asyncio.create_task(Reloading(keys, []).run())
    write(file, content("second"))
    await eventually(lambda: knows(auth, "second"), description="the keys of the new content")
    following.cancel()
    await asyncio.wait([following])

    monkeypatch.setattr("qinfer_api.reloading.LOOK_EVERY_S", 3600.0)
    reloading = Reloading(keys, [])
    following = asyncio.create_task(reloading.run())
    await asyncio.sleep(0)
    write(file, content("third"))
    reloading.ask()
    await eventually(lambda: knows(auth, "third"), description="the keys of the new content")

    following.cancel()
    await asyncio.wait([following])


async def test_a_certificate_that_cannot_be_read_keeps_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without API keys too."""
    shown = asyncio.Event()

    async def missing() -> None:
        raise SettingsError("QINFER_HTTP__TLS_CERTFILE=/x: there is no such file")

    async def exhausted() -> None:
        raise OSError(24, "Too many open files")

    async def good() -> None:
        shown.set()

    reloading = Reloading(None, [missing, exhausted, good])
    following = asyncio.create_task(reloading.run())
    reloading.ask()
    await shown.wait()

    assert errors(caplog) == ["QINFER_HTTP__TLS_CERTFILE=/x: there is no such file", "Too many open files"]
    following.cancel()
    await asyncio.wait([following])

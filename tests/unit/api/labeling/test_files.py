"""Where the files of tasks may come from, and what is refused."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.settings import LabelingSettings, StoreSettings
from qinfer.errors import Forbidden, InvalidRequest, PayloadTooLarge, QinferError, Unreachable
from qinfer_api.labeling.studio import Files, LabelStudio
from tests.support.servers.label_studio_server import PERSONAL, LabelStudioServer, label_studio


async def to_loopback(host: str, port: int) -> Sequence[str]:
    """Resolves every name to this machine."""
    return ["127.0.0.1"]


@contextlib.asynccontextmanager
async def fetching(
    url: str = "", stores: Sequence[str] = (), *, is_shared: bool = False, **changes: Any
) -> AsyncIterator[Files]:
    about = {"url": url, "token": PERSONAL, "file_timeout_s": 5.0, **changes}
    settings = LabelingSettings.model_validate(about)
    studio = LabelStudio(settings) if url else None
    files = Files(settings, StoreSettings(allow=tuple(stores)), studio, to_loopback, lambda: is_shared)
    try:
        yield files
    finally:
        await files.close()
        if studio is not None:
            await studio.close()


@contextlib.asynccontextmanager
async def serving(answer: bytes) -> AsyncIterator[int]:
    """Answers every connection with the same bytes; gives the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def studio() -> AsyncIterator[LabelStudioServer]:
    async with label_studio() as studio:
        studio.files["/data/upload/1/a b.png"] = b"an image"
        studio.files["/data/upload/1/a%20b.png"] = b"an image"
        yield studio


async def test_what_label_studio_keeps_is_fetched_with_its_token(studio: LabelStudioServer) -> None:
    """By its path, or by its whole URL."""
    async with fetching(studio.url) as files:
        for reference in ("/data/upload/1/a%20b.png", f"{studio.url}/data/upload/1/a%20b.png?d=1"):
            assert await files.fetch(reference) == b"an image"


@pytest.mark.parametrize(
    "reference",
    [
        "/api/users/",
        "/data/../api/users/",
        "/data/./upload/1/a b.png",
        "/data/%2e%2e/api/users/",
        "/data//evil",
        "/data/\\evil",
        "/data/a#b",
        "/data/a\r\nhost: b",
        "//api/data/a",
        "//[a/data/b",
        pytest.param("/data/" + "a" * 3000, id="long"),
    ],
)
async def test_nothing_else_of_label_studio_is(studio: LabelStudioServer, reference: str) -> None:
    """The token would open it."""
    async with fetching(studio.url) as files:
        with pytest.raises(InvalidRequest, match="below /data/"):
            await files.fetch(reference)
    assert studio.calls == []


async def test_redirects_of_label_studio_are_not_followed(studio: LabelStudioServer) -> None:
    """They lead to a store that nobody has checked; to try again changes nothing."""
    studio.failures["/data/"] = [303]
    async with fetching(studio.url) as files:
        with pytest.raises(InvalidRequest, match="kept elsewhere"):
            await files.fetch("/data/upload/1/a%20b.png")


async def test_label_studio_has_to_be_known() -> None:
    """The text says by which setting."""
    async with fetching() as files:
        with pytest.raises(InvalidRequest, match="QINFER_LABELING__URL"):
            await files.fetch("/data/upload/1/a.png")


async def test_allowed_hosts_are_fetched_from() -> None:
    """Others are not, and no address within the network, unless a setting says so."""
    async with serving(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc") as port:
        url = f"http://files.example:{port}/x?token=hidden"
        host = f"files.example:{port}"
        async with fetching(file_hosts=(host,), file_hosts_private=True) as files:
            assert await files.fetch(url) == b"abc"
            with pytest.raises(InvalidRequest, match="QINFER_LABELING__FILE_HOSTS lists"):
                await files.fetch(f"http://127.0.0.1:{port}/x")
        async with fetching(file_hosts=(host,)) as files:
            with pytest.raises(InvalidRequest, match="leads into a private network") as refused:
                await files.fetch(url)
            assert "hidden" not in str(refused.value)
        async with fetching() as files:
            with pytest.raises(InvalidRequest, match="may not be fetched from"):
                await files.fetch(url)


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"HTTP/1.1 302 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", InvalidRequest, "redirects"),
        (b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n", InvalidRequest, "status 404"),
        (b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", Unreachable, "status 500"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000, PayloadTooLarge, "MAX_FILE_BYTES"),
        (b"HTTP/1.1 200 X\r\ncontent-length: 20\r\n\r\nx", Unreachable, "can't be reached"),
        (b"HTTP/1.1 200 X\r\ncontent-encoding: gzip\r\ncontent-length: 1\r\n\r\nx", InvalidRequest, "encoded"),
        (b"nonsense", Unreachable, "can't be reached"),
    ],
)
async def test_what_hosts_answer(answer: bytes, error: type[QinferError], words: str) -> None:
    """Later it may be another answer, or it may not."""
    async with serving(answer) as port:
        hosts = (f"files.example:{port}",)
        async with fetching(file_hosts=hosts, file_hosts_private=True, max_file_bytes=1000) as files:
            with pytest.raises(error, match=words):
                await files.fetch(f"http://files.example:{port}/x")


async def test_a_host_that_is_silent_is_left() -> None:
    """After as long as a file may take."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other side has hung up
        writer.close()
        hung_up.set()

    hung_up = asyncio.Event()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with (
        server,
        fetching(file_hosts=(f"a.example:{port}",), file_hosts_private=True, file_timeout_s=0.05) as files,
    ):
        with pytest.raises(Unreachable):
            await files.fetch(f"http://a.example:{port}/x")
        await hung_up.wait()


async def test_stores_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    """And nowhere else on this machine."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"content")
    (tmp_path / "out.txt").write_bytes(b"secret")
    async with fetching(stores=[f"file://{tmp_path}/in"], max_file_bytes=10) as files:
        assert await files.fetch(f"file://{tmp_path}/in/a.txt") == b"content"
        with pytest.raises(InvalidRequest, match="is not in its store"):
            await files.fetch(f"file://{tmp_path}/in/none.txt")
        with pytest.raises(Forbidden):
            await files.fetch(f"file://{tmp_path}/out.txt")
        with pytest.raises(InvalidRequest):
            await files.fetch(f"file://{tmp_path}/in/../out.txt")
        (tmp_path / "in" / "a.txt").write_bytes(b"content" * 2)
        with pytest.raises(PayloadTooLarge):
            await files.fetch(f"file://{tmp_path}/in/a.txt")


async def test_a_store_that_hangs_keeps_no_threads_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that decode bodies, and take whatever else takes long."""
    released = threading.Event()

    class Hanging:
        def stat(self, url: str) -> None:
            released.wait(30)

    monkeypatch.setattr("qinfer_api.labeling.studio.store_for", lambda url: Hanging())
    async with fetching(stores=[f"file://{tmp_path}"]) as files, asyncio.TaskGroup() as group:
        for number in range(40):  # more than there are threads by default
            group.create_task(_refused(files.fetch(f"file://{tmp_path}/{number}")))
        await asyncio.sleep(0)
        await asyncio.to_thread(released.set)


async def _refused(fetching: Awaitable[bytes]) -> None:
    with pytest.raises(InvalidRequest, match="is not in its store"):
        await fetching


async def test_a_data_uri_is_its_content() -> None:
    """As far as it is base64, and not too long."""
    async with fetching(max_file_bytes=6) as files:
        assert await files.fetch("data:image/png;base64,YWJjZA==") == b"abcd"
        for uri in ("data:text/plain,abc", "data:;base64,????", "data:;base64," + "A" * 100, "", "a.png", "ftp://x/y"):
            with pytest.raises(QinferError):
                await files.fetch(uri)


@pytest.mark.parametrize("path", ["/data/upload/1/a b.png", "/data/upload/01/a b.png", "/data/%75pload/1%2Fa%20b.png"])
async def test_of_several_tenants_each_has_the_files_of_its_projects(studio: LabelStudioServer, path: str) -> None:
    """The server's token reads them all."""
    async with fetching(studio.url, is_shared=True) as files:
        for reference in (path, studio.url + path):
            with pytest.raises(Forbidden, match=r"project 0?1, and the mapping is for 2, 3; upload it there"):
                await files.fetcher_for("other", (2, 3))(reference)
        assert await files.fetcher_for("acme", (1,))("/data/upload/1/a%20b.png") == b"an image"


async def test_a_tenants_task_has_files_of_its_folder_in_a_store(tmp_path: Path) -> None:
    """Not of another's, by a link neither."""
    for name in ("acme", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "other" / "link").symlink_to("../acme/a.txt")

    async with fetching(stores=[f"file://{tmp_path}"], is_shared=True) as files:
        for path in ("acme/a.txt", "other/link", "a.txt"):
            with pytest.raises(Forbidden, match="tenant 'other' may read"):
                await files.fetcher_for("other", ())(f"file://{tmp_path}/{path}")
        assert await files.fetcher_for("other", ())(f"file://{tmp_path}/other/a.txt") == b"other"

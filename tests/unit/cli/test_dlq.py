"""`qinfer dlq` as people type it: what it shows, writes, puts back and removes."""

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from qinfer.cli import dlq
from qinfer.cli.main import app
from qinfer.core.messages import InferRequest
from qinfer.core.settings import RedisSettings, variable_names
from qinfer.models.state import DesiredState
from qinfer.models.store import ControlStore
from qinfer.queue.clients import admin_client
from qinfer.queue.entries import Lane, Payload
from qinfer.queue.lanes import Queue
from qinfer.tensors import Tensor, pack_bytes
from qinfer.testing import EmbeddedServer
from qinfer.wire.frame import encode_request, encode_request_apart

LANE = Lane("digits", 3)
T = TypeVar("T")
WHY = ("inference_failed", "the worker died 3 times")


def request(name: str = "image", reply_to: str = "reply:g1") -> InferRequest:
    return InferRequest(
        model="digits",
        id="r1",
        inputs=(
            Tensor(name, "FP32", (1, 3), struct.pack("<3f", 1.0, 2.0, 3.0)),
            Tensor("label", "BYTES", (1,), pack_bytes([b"cat\x00"])),
        ),
        timeout_s=2.5,
        reply_to=reply_to,
        parameters={"top": 5},
    )


class OwnDatabase:
    """The queue that every command finds.

    Attributes:
        option: How commands are told where it is.
    """

    def __init__(self, url: str) -> None:
        self.option = ("--redis", url)
        self._settings = RedisSettings(url=SecretStr(url))

    def ask(self, work: Callable[[Queue], Awaitable[T]]) -> T:
        """Does something with the queue, from outside any event loop."""

        async def connected() -> T:
            delivery = await Queue.connect(self._settings)
            try:
                return await work(delivery)
            finally:
                await delivery.close()

        return asyncio.run(connected())

    def declare(self, *models: str) -> None:
        """Notes models as once loaded."""

        async def noted() -> None:
            store = ControlStore(admin_client(self._settings))
            for model in models:
                await store.set_desired(DesiredState(model, 1, load=False))
            await store.close()

        asyncio.run(noted())

    def ids(self) -> list[str]:
        """Returns the ids of the dead letters."""
        return [letter.id for letter in self.ask(lambda delivery: delivery.dead_letters.list("digits", count=10_000))]

    def waiting(self) -> int:
        """Returns how many entries wait in the lane."""
        return self.ask(lambda delivery: delivery.depth([LANE]))[0]

    def bury(self, *frames: bytes, payload: bytes | None = None) -> list[str]:
        """Buries frames, one dead letter each; returns their ids."""

        async def buried(delivery: Queue) -> None:
            stored = None if payload is None else Payload("r1", payload, 60.0)
            await delivery.ensure([LANE])
            for frame in frames:
                delivery.submit(LANE, frame, lambda _: None, payload=stored)
            left = len(frames)
            while left:
                for lease in await delivery.fetch([LANE], "a", 100, 1.0):
                    assert await delivery.bury(lease, "r1", *WHY)
                    left -= 1

        self.ask(buried)
        return self.ids()


@pytest.fixture
def queue(embedded: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> OwnDatabase:
    monkeypatch.setenv("COLUMNS", "250")
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)
    return OwnDatabase(embedded.database())


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["dlq", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("command", ["list", "show", "replay", "purge"])
def test_help_has_an_example(command: str) -> None:
    """Help that can be copied from."""
    code, stdout, _ = run(command, "--help")

    assert code == 0
    assert "Example: qinfer dlq" in stdout
    assert f"qinfer dlq {command} digits" in stdout


def test_list_says_what_was_given_up_and_why(queue: OwnDatabase) -> None:
    """Id, lane, request, how often, how large, the error."""
    [letter_id] = queue.bury(encode_request(request()))

    code, stdout, _ = run("list", "digits", *queue.option)

    assert code == 0
    for part in (letter_id, "3:p1", "r1", "inference_failed: the worker died 3 times"):
        assert part in stdout


def test_list_prints_json_in_pages(queue: OwnDatabase) -> None:
    """`--after` takes the last id of the page before."""
    ids = queue.bury(*[encode_request(request())] * 5)

    _, first, _ = run("list", "digits", "--count", "3", "--json", *queue.option)
    _, second, _ = run("list", "digits", "--count", "3", "--after", ids[2], "--json", *queue.option)
    _, table, _ = run("list", "digits", "--count", "3", *queue.option)

    assert [row["id"] for row in json.loads(first) + json.loads(second)] == ids
    assert json.loads(first)[0]["deliveries"] == 1
    assert f"There may be more: qinfer dlq list digits --after {ids[2]}" in table


def test_an_empty_list_says_so(queue: OwnDatabase) -> None:
    """No table without rows."""
    assert run("list", "digits", *queue.option) == (0, "model 'digits' has no dead letters\n", "")


def test_all_models_are_listed_without_one(queue: OwnDatabase) -> None:
    """Those that were ever loaded; each letter says whose it is."""
    ids = queue.bury(encode_request(request()), encode_request(request()))
    assert run("list", *queue.option) == (0, "there are no dead letters\n", "")
    queue.declare("digits", "other")

    code, table, _ = run("list", *queue.option)
    _, document, _ = run("list", "--json", *queue.option)
    _, first, _ = run("list", "--json", "--count", "1", *queue.option)

    assert code == 0
    assert [(row["model"], row["id"]) for row in json.loads(document)] == [("digits", letter_id) for letter_id in ids]
    assert [row["id"] for row in json.loads(first)] == ids[:1]
    assert all(letter_id in table for letter_id in ids)


@pytest.mark.parametrize("model", [[], ["digits"]], ids=["all", "one"])
def test_ids_are_never_cut(queue: OwnDatabase, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command takes them."""
    [letter_id] = queue.bury(encode_request(request()))
    queue.declare("digits")
    monkeypatch.setenv("COLUMNS", "40")

    _, table, _ = run("list", *model, *queue.option)

    assert letter_id in table


@pytest.mark.parametrize("apart", [False, True], ids=["inline", "payload"])
def test_show_describes_the_request_and_writes_its_tensors(queue: OwnDatabase, tmp_path: Path, *, apart: bool) -> None:
    """Arrays as .npy, BYTES as they travel, wherever the tensors were."""
    frame, payload = encode_request_apart(request()) if apart else (encode_request(request()), None)
    [letter_id] = queue.bury(frame, payload=payload)

    code, stdout, _ = run("show", "digits", letter_id, "--output", str(tmp_path / "letter"), *queue.option)

    assert code == 0
    for part in ("synchronous request", "2.5 s", "{'top': 5}", "image", "FP32", "[1, 3]", "label", "BYTES"):
        assert part in stdout
    assert np.load(tmp_path / "letter" / "0-image.npy").tolist() == [[1.0, 2.0, 3.0]]
    assert (tmp_path / "letter" / "1-label.bin").read_bytes() == pack_bytes([b"cat\x00"])


def test_show_prints_json(queue: OwnDatabase) -> None:
    """With the inputs' names, datatypes, shapes and sizes."""
    [letter_id] = queue.bury(encode_request(request(reply_to="")))

    _, stdout, _ = run("show", "digits", letter_id, "--json", *queue.option)

    letter = json.loads(stdout)
    assert letter["kind"] == "asynchronous request"
    assert letter["inputs"][0] == {"name": "image", "datatype": "FP32", "shape": [1, 3], "size": 12}
    assert letter["row"]["code"] == "inference_failed"


def test_a_name_in_a_request_is_nobodys_path(queue: OwnDatabase, tmp_path: Path) -> None:
    """Tensors are written inside the directory, whatever they are called."""
    [letter_id] = queue.bury(encode_request(request("../../etc/x y")))

    run("show", "digits", letter_id, "--output", str(tmp_path / "in"), *queue.option)

    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["0-.._.._etc_x_y.npy", "1-label.bin"]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_tensor_that_does_not_fill_its_shape_is_written_as_it_is(queue: OwnDatabase, tmp_path: Path) -> None:
    """It may be why the request is here."""
    broken = InferRequest(model="digits", inputs=(Tensor("x", "FP32", (5,), b"\x01\x02\x03"),))
    [letter_id] = queue.bury(encode_request(broken))

    code, _, _ = run("show", "digits", letter_id, "--output", str(tmp_path), *queue.option)

    assert code == 0
    assert (tmp_path / "0-x.bin").read_bytes() == b"\x01\x02\x03"


def test_what_cannot_be_decoded_is_shown_and_kept(queue: OwnDatabase, tmp_path: Path) -> None:
    """The reason, and the frame as it is."""
    [letter_id] = queue.bury(b"\x01\x02")

    code, stdout, _ = run("show", "digits", letter_id, "--output", str(tmp_path), *queue.option)

    assert code == 0
    assert "frame of 2 bytes is too short" in stdout
    assert (tmp_path / "frame.bin").read_bytes() == b"\x01\x02"


@pytest.mark.parametrize("command", ["show", "replay"])
def test_a_letter_that_is_gone_is_an_error(queue: OwnDatabase, command: str) -> None:
    """With the command that lists them."""
    code, _, stderr = run(command, "digits", "17-0", *queue.option)

    assert code == 1
    assert "model 'digits' has no dead letter 17-0" in stderr
    assert "qinfer dlq list digits" in stderr


@pytest.mark.parametrize(
    "arguments",
    [("show", "digits", "x"), ("list", "digits", "--after", "x"), ("replay", "digits", "x")],
    ids=["show", "list", "replay"],
)
def test_what_is_no_id_is_wrong_usage(queue: OwnDatabase, arguments: tuple[str, ...]) -> None:
    """The message shows what one looks like."""
    code, _, stderr = run(*arguments, *queue.option)

    assert code == 64
    assert stderr == "Error: 'x' is not a dead letter's id; expected one such as 1700000000123-0\n"


@pytest.mark.parametrize("command", ["replay", "purge"])
@pytest.mark.parametrize("arguments", [(), ("1-0", "--all")], ids=["neither", "both"])
def test_ids_or_all(queue: OwnDatabase, command: str, arguments: tuple[str, ...]) -> None:
    """One of the two, so that nothing is put back or removed by mistake."""
    code, _, stderr = run(command, "digits", *arguments, "--yes" if command == "purge" else "--json", *queue.option)

    assert code == 64
    assert "give --all" in stderr


def test_replay_puts_back_the_named_ones(queue: OwnDatabase) -> None:
    """And leaves the others."""
    first, second, third = queue.bury(*[encode_request(request())] * 3)

    assert run("replay", "digits", first, third, *queue.option) == (0, "2 replayed\n", "")

    assert queue.waiting() == 2
    assert queue.ids() == [second]


def test_replay_all_puts_back_more_than_a_page(queue: OwnDatabase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once."""
    monkeypatch.setattr(dlq, "_PAGE", 2)
    queue.bury(*[encode_request(request())] * 5)

    assert run("replay", "digits", "--all", "--json", *queue.option) == (0, '{"replayed": 5}\n', "")

    assert queue.waiting() == 5


def test_purge_wants_a_yes(queue: OwnDatabase) -> None:
    """What is removed can't be brought back."""
    queue.bury(*[encode_request(request())] * 2)

    code, _, stderr = run("purge", "digits", "--all", *queue.option)

    assert code == 64
    assert "add --yes" in stderr
    assert run("purge", "digits", "--all", "--yes", *queue.option) == (0, "2 removed\n", "")
    assert queue.waiting() == 0

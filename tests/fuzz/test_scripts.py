"""Lua scripts with arguments that qinfer does not send: refused, or done; never without end, never to other keys."""

import asyncio
import importlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

import qinfer
from qinfer.core.messages import InferRequest
from qinfer.queue.entries import Lane
from qinfer.queue.router import Script
from qinfer.testing import EmbeddedServer
from qinfer.wire.frame import encode_request
from tests.support.fuzzing import fuzz, within_limits
from tests.support.servers.servers import Database

pytestmark = within_limits

PACKAGE = Path(qinfer.__file__).parent
ANSWER_S = 5.0
"""Seconds that a script may take at the most: the others wait meanwhile."""

NUMBERS = b"0 1 2 -1 -0 3.7 1e3 1e15 1e308 inf -inf nan 0x10".split()
NAMES = b"workers released suspects takers w1 queued running put move waiting none given staged done drop a".split()
FORMS = [
    b"",
    b"5-1",
    b"0-0",
    b"(5-1",
    b"+",
    b"%s %d",
    b"\xff\xfe\x00",
    b"\n",
    b"id\nhash",
    b"0 0 0 ",
    b'{"generation":"x"}',
]
WORDS = [*NUMBERS, *NAMES, *FORMS, b"9" * 400, b"x" * 5000]


def scripts() -> dict[str, bytes]:
    """Returns the text of each script of the library, by its name."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        if "load_script" in file.read_text():
            module = importlib.import_module(".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts))
            for name, value in vars(module).items():
                tables = value.items() if isinstance(value, dict) else [("", value)]
                for key, each in tables:
                    text = each.text if isinstance(each, Script) else each
                    if isinstance(text, bytes) and b"redis.call(" in text:
                        found[f"{module.__name__}.{name}{key and f'.{key}'}"] = text
    return found


SCRIPTS = scripts()


def test_every_script_is_known() -> None:
    """The files of all `lua/` folders are parts of scripts that are found here."""
    whole = b"".join(SCRIPTS.values())

    assert [str(file) for file in PACKAGE.rglob("lua/**/*.lua") if file.read_bytes() not in whole] == []


class Keys:
    """A key of each type, and a queue of another model beside them."""

    NAMES = tuple(b"{k}:" + kind for kind in b"none string number hash zset list set lane group".split())

    def __init__(self, url: str) -> None:
        self.client: Any = redis.Redis.from_url(url, protocol=2, socket_timeout=ANSWER_S)

    def fill(self) -> None:
        """Makes the keys as they were."""
        pipe = self.client.pipeline(transaction=False)
        pipe.delete(*self.NAMES)
        pipe.set("{k}:string", b"1\n2")
        pipe.set("{k}:number", b"7")
        pipe.hset(
            "{k}:hash", mapping={"state": "queued", "name": "n", "1": "1 1 0 ", "generation": "1", "entry": "5-1"}
        )
        pipe.zadd("{k}:zset", {"1:frame": 1, "5-1": 2.5, "a": 1e15})
        pipe.rpush("{k}:list", "a")
        pipe.sadd("{k}:set", "a")
        for name in ("{k}:lane", "{k}:group"):
            for number in range(1, 4):
                pipe.xadd(name, {"f": "frame", "p": "1"}, id=f"5-{number}")
        pipe.xgroup_create("{k}:group", "workers", "0")
        pipe.xreadgroup("workers", "w1", {"{k}:group": ">"}, count=2)
        pipe.execute()

    def bystanders(self) -> dict[bytes, bytes]:
        """Returns what is in the keys of the queue beside them."""
        return {key: self.client.dump(key) for key in self.client.scan_iter("*{m#0}*", count=1000)}


def run(keys: Keys, name: str, names: Sequence[bytes], words: Sequence[bytes]) -> None:
    """Runs a script, which may refuse what it is given."""
    try:
        keys.client.eval(SCRIPTS[name], len(names), *names, *words)
    except redis.TimeoutError:
        pytest.fail(f"{name} runs without end: KEYS {names}, ARGV {words}")
    except redis.ResponseError:
        pass


HASH, NONE = b"{k}:hash", b"{k}:none"


@pytest.mark.parametrize(
    ("name", "names", "words"),
    [
        ("qinfer.queue.requests._ACCEPT", [], [b"1e15", b"0"]),
        ("qinfer.queue.requests._ACCEPT", [NONE], [b"1", b"1", b"1e15"]),
        ("qinfer.jobs.queue.jobs._SCRIPTS.move", [HASH], [b"1", b"failed", b"1e15"]),
        (
            "qinfer.bridge.reports._REPORT",
            [NONE, b"{k}:zset", NONE],
            [b"1", b"1", b"w1", b"1", b"0", b"", b"a", b"1e15"],
        ),
    ],
)
async def test_counts_that_no_argument_follows(
    name: str, names: list[bytes], words: list[bytes], timed: EmbeddedServer, database: Database
) -> None:
    """A loop ends with the arguments, whatever they say."""
    keys = Keys(database.settings.url.get_secret_value())
    keys.fill()

    run(keys, name, names, words)


async def test_dead_letters_of_no_number_of_bytes(timed: EmbeddedServer, database: Database) -> None:
    """What is no number is neither more nor less than there is."""
    keys = Keys(database.settings.url.get_secret_value())
    keys.fill()

    for entry in (b"5-1", b"5-2"):
        words = [b"workers", b"w1", entry, b"1:p1", b"1", b"code", b"reason", b"1000", b"nan"]
        run(keys, "qinfer.queue.lanes._BURY", [b"{k}:group", NONE], words)


def arguments(chance: random.Random) -> tuple[list[bytes], list[bytes]]:
    """Returns KEYS and ARGV."""
    keys = [chance.choice(Keys.NAMES) for _ in range(chance.choice((0, 1, 2, 3, 5, 6, 7, 8, 9)))]
    favoured = chance.sample(WORDS, 6)
    return keys, [chance.choice(favoured if chance.random() < 0.5 else WORDS) for _ in range(chance.randint(0, 24))]


async def test_odd_arguments(timed: EmbeddedServer, database: Database) -> None:
    """Each is answered soon, leaves what is another's alone, and the queue beside it works as before."""
    queue = await database.delivery()
    lane = Lane("m", 1)
    await queue.ensure([lane])
    submitted = asyncio.get_running_loop().create_future()
    queue.submit(lane, encode_request(InferRequest(model="m", id="1", inputs=())), submitted.set_result)
    await submitted
    keys = Keys(database.settings.url.get_secret_value())
    before = keys.bystanders()

    def one(chance: random.Random) -> None:
        name = chance.choice(sorted(SCRIPTS))
        keys.fill()
        for _ in range(20):
            run(keys, name, *arguments(chance))
        assert keys.bystanders() == before, name

    fuzz(0.05, one)

    (lease,) = await queue.fetch([lane], "w1", 5, 1.0)
    await queue.finish([lease.entry])
    assert await queue.depth([lane]) == [0]

"""The Lua scripts of `lua/`, and how one is run: by its hash, and by its text where the server does not know it yet."""

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from qinfer.delivery.connection import Argument, Refused


class Script(msgspec.Struct, frozen=True):
    """A Lua script: its text, and the SHA-1 by which Redis knows it."""

    text: bytes
    sha: bytes


def _load(name: str, *parts: str) -> Script:
    """Reads a script; `parts` are the files of the functions that it uses."""
    folder = files("qinfer.delivery").joinpath("lua")
    text = b"\n".join(folder.joinpath(f"{part}.lua").read_bytes() for part in (*parts, name))
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


FETCH = _load("fetch")
RECLAIM = _load("reclaim")
RENEW = _load("renew")
RELEASE = _load("release")
SIZES = _load("sizes")
FINISH = _load("finish", "drop")
SUBMIT = _load("submit", "waiting")
WITHDRAW = _load("withdraw", "drop")
DELAY = _load("delay")
BURY = _load("bury", "trim_letters")
LETTERS = _load("letters")
REPLAY = _load("replay", "now_ms", "drop")
KEEP = _load("keep")
PUBLISH = _load("publish")
READ = _load("read")
REFER = _load("refer", "drop")
REMOVE = _load("remove", "drop")
ACCEPT = _load("accept", "waiting", "now_ms", "drop", "tell", "accept_one")
ACCEPT_EACH = _load("each", "waiting", "now_ms", "drop", "tell", "accept_one")
SETTLE = _load("settle", "now_ms", "drop", "tell", "settle_one")
SETTLE_EACH = _load("each", "now_ms", "drop", "tell", "settle_one")
RECORD = _load("record")
DUE = _load("due", "now_ms")
NOTICES = _load("notices", "forget_consumers")
CONFIRM = _load("confirm")
ENDINGS = _load("endings", "forget_consumers")
CONFIRM_ENDINGS = _load("confirm_endings")

LABEL_STEP = _load("label_step", "now_ms")
LABEL_CLAIM = _load("label_claim", "now_ms")

JOB_CREATE = _load("job_create", "now_ms")
JOB_DELETE = _load("job_delete", "now_ms", "job")
JOB_FINISH = _load("job_finish", "now_ms", "job", "trim_letters")
JOB_MISSING = _load("job_missing")
JOB_MOVE = _load("job_move", "now_ms", "job")
JOB_NOTE = _load("job_note", "now_ms", "job")
JOB_PLAN = _load("job_plan", "now_ms", "job")
JOB_STOP = _load("job_stop", "now_ms", "job")
JOB_TOP_UP = _load("job_top_up", "now_ms", "job")
JOB_WITHDRAW = _load("job_withdraw", "now_ms", "job")


async def run(call: Callable[..., Awaitable[Any]], script: Script, keys: Sequence[bytes], *arguments: Argument) -> Any:
    """Runs a script.

    Args:
        call: Sends one command and returns its reply, such as `Link.call`.
        script: Which.
        keys: Its KEYS, all in one cluster slot.
        arguments: Its ARGV.

    Raises:
        QinferError: What the script or `call` raises.
    """
    try:
        return await call(b"EVALSHA", script.sha, len(keys), *keys, *arguments)
    except Refused as error:
        if error.kind != "NOSCRIPT":
            raise
    return await call(b"EVAL", script.text, len(keys), *keys, *arguments)


class Words(NamedTuple):
    """KEYS and ARGV of a script."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument]


async def run_each(call: Callable[..., Awaitable[Any]], script: Script, requests: Sequence[Words]) -> Any:
    """Runs a script of `each.lua`; returns what it returns for each request.

    Args:
        call: As for `run`.
        script: Which.
        requests: KEYS and ARGV for each; all keys in one cluster slot, as many for each.
    """
    keys: list[bytes] = []
    arguments: list[Argument] = [len(requests), len(requests[0].keys)]
    for words in requests:
        keys += words.keys
        arguments.append(len(words.arguments))
        arguments += words.arguments
    return await run(call, script, keys, *arguments)

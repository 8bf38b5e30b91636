"""The Lua scripts of `lua/`, and how one is run: by its hash, and by its text where the server does not know it yet.

A script is called as a Python function. To add one:

1. Write `lua/<subject>/<name>.lua`, or `lua/<name>.lua` in the package of the feature that alone runs it. Its header
   says what it does, and names KEYS, ARGV and the reply in order. Functions that several scripts need are files of
   their own: beside those scripts, or in `lua/common/`.
2. In the `<subject>_scripts.py` of its subject, or beside the class that alone runs it, load it with the files that it
   needs: `_DUE = scripts.load("requests/due", "now_ms")`.
3. Write the function beneath: `async def due(call: Call, model: str, …, count: int) -> list[Address]`. Its parameters
   are what the script takes, in the types of the subject; its return type is what the reply is read as. Its body spells
   keys (by `keys`) and arguments in the order of the header, and calls `run`. Durations are float seconds until
   `ttl_ms` makes milliseconds of them.

Nobody else runs that script, or knows the order of its arguments. `each.lua` runs a script, written as the function
`one`, for several requests of one partition: load `each` with that file, and call `run_each`.
"""

from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from qinfer.queue.connection import Argument, Refused

Call = Callable[..., Awaitable[Any]]
"""Sends one command and returns its reply, such as `Link.call`."""


class Script(msgspec.Struct, frozen=True):
    """A Lua script: its text, and the SHA-1 by which Redis knows it."""

    text: bytes
    sha: bytes


def load(name: str, *parts: str, package: str = "qinfer.queue") -> Script:
    """Reads a script from a package's `lua/`; `parts` are files of functions there, or in the queue's `lua/common/`."""
    own, common = files(package).joinpath("lua"), files("qinfer.queue").joinpath("lua", "common")
    places = ((own.joinpath(f"{file}.lua"), common.joinpath(f"{file}.lua")) for file in (*parts, name))
    text = b"\n".join((place if place.is_file() else shared).read_bytes() for place, shared in places)
    return Script(text, sha1(text, usedforsecurity=False).hexdigest().encode())


RENEW = load("lanes/renew")
"""Renews leases; its text is run by the renewer of a worker."""


async def run(call: Call, script: Script, keys: Sequence[bytes], *arguments: Argument) -> Any:
    """Runs a script.

    Args:
        call: Sends a command to the node of its keys.
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


def ttl_ms(seconds: float) -> int:
    """Returns a time to live in milliseconds; Redis takes none of 0."""
    return max(1, int(seconds * 1000))


class Words(NamedTuple):
    """KEYS and ARGV of a script."""

    keys: Sequence[bytes]
    arguments: Sequence[Argument]


async def run_each(call: Call, script: Script, requests: Sequence[Words]) -> Any:
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

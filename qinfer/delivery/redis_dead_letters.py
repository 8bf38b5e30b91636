"""Dead letters on Redis: a stream per partition, which `bury.lua` writes and keeps within bounds."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from qinfer.delivery import keys, scripts
from qinfer.delivery.base import Lane
from qinfer.delivery.dead_letters import DeadLetter, id_of, payload_ttl_s, place_after
from qinfer.delivery.requests import MARGIN_S
from qinfer.delivery.router import Router

_PARTITION = 0  # until models are spread over several
_BYTES = (b"frame", b"payload")


class RedisDeadLetters:
    """`DeadLetters` beside `RedisDelivery`.

    Args:
        router: The way to Redis.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    async def list(self, model: str, *, after: str = "", count: int = 100) -> "list[DeadLetter]":
        """See `DeadLetters.list`."""
        millisecond, number = place_after(after)
        return [*await self._read(model, f"({millisecond}-{number}", count, _BYTES)]

    async def show(self, model: str, letter_id: str) -> DeadLetter | None:
        """See `DeadLetters.show`."""
        return await self._one(model, letter_id, ())

    async def replay(self, model: str, letter_id: str) -> bool:
        """See `DeadLetters.replay`."""
        letter = await self._one(model, letter_id, (b"payload",))
        if letter is None:
            return False
        partition = letter.lane.partition
        names = [
            _key(model),
            keys.lane(letter.lane),
            keys.payload(model, partition, letter.request_id).encode(),
            keys.request(model, partition, letter.request_id).encode(),
            keys.result(model, partition, letter.request_id).encode(),
            keys.due(model, partition).encode(),
        ]
        ttl_ms = int(payload_ttl_s(letter.frame) * 1000)
        arguments = (letter_id, letter.request_id, ttl_ms, letter.lane.name, int(MARGIN_S * 1000))
        return await self._run(model, scripts.REPLAY, names, *arguments) is not None

    async def purge(self, model: str, letter_ids: "Sequence[str] | None" = None) -> int:
        """See `DeadLetters.purge`."""
        key = _key(model)
        if letter_ids is None:
            return int(await self._router.call(keys.slot(key), b"XTRIM", key, b"MAXLEN", 0))
        ids = [letter_id for letter_id in letter_ids if id_of(letter_id) is not None]
        return int(await self._router.call(keys.slot(key), b"XDEL", key, *ids)) if ids else 0

    async def _one(self, model: str, letter_id: str, left_out: Sequence[bytes]) -> DeadLetter | None:
        letters = await self._read(model, letter_id, 1, left_out) if id_of(letter_id) is not None else []
        return letters[0] if letters and letters[0].id == letter_id else None

    async def _read(self, model: str, start: str, count: int, left_out: Sequence[bytes]) -> Sequence[DeadLetter]:
        found = await self._run(model, scripts.LETTERS, [_key(model)], start, count, *left_out)
        return [_letter(model, letter_id, fields) for letter_id, fields in found]

    async def _run(self, model: str, script: scripts.Script, names: Sequence[bytes], *arguments: Any) -> Any:
        return await scripts.run(partial(self._router.call, keys.slot(_key(model))), script, names, *arguments)


def _key(model: str) -> bytes:
    return keys.dead_letters(model, _PARTITION).encode()


def _letter(model: str, letter_id: bytes, fields: Sequence[bytes]) -> DeadLetter:
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    version, _, name = values[b"lane"].decode().partition(":")
    return DeadLetter(
        id=letter_id.decode(),
        lane=Lane(model, int(version), name, _PARTITION),
        request_id=values[b"request_id"].decode(),
        code=values[b"code"].decode(),
        reason=values[b"reason"].decode(),
        deliveries=int(values[b"deliveries"]),
        buried_at=int(letter_id.partition(b"-")[0]) / 1000,
        size=int(values[b"size"]),
        frame=values.get(b"frame", b""),
        payload=values.get(b"payload", b""),
    )

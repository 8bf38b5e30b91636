"""Request heads that were seen before: what lets most requests skip the parser."""

from qinfer_api.http.fast import Head

_END_OF_HEAD = b"\r\n\r\n"
_MAX_KNOWN = 1024
_MAX_KNOWN_BYTES = 4096


class KnownHeads:
    """Heads by their bytes, learned from the parser: clients mostly send the same head again and again.

    Head and body that arrive in one packet, as small requests do, then need no parsing: equal bytes mean the same.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}
        self._last: tuple[bytes, int, Head] | None = None  # the head found last, and the length of its packets

    def find(self, packet: bytes) -> tuple[Head, bytes] | None:
        """Splits a packet that is exactly one request whose head is known; `None` for any other."""
        if self._last is not None:
            begin, length, head = self._last
            if len(packet) == length and packet.startswith(begin):
                return head, packet[len(begin) :]
        end = packet.find(_END_OF_HEAD) + 4
        begin = packet[:end]
        found = self._heads.get(begin)
        if found is None or len(packet) - end != found.length:
            return None
        self._last = begin, len(packet), found
        return found, packet[end:]

    def learn(self, packet: bytes, head: Head) -> None:
        """Remembers the head of a packet in which the parser found exactly one request, and that by its end.

        One with an API key may be: equal bytes are an equal key. One that is traced comes once only.
        """
        end = packet.find(_END_OF_HEAD) + 4
        if end <= _MAX_KNOWN_BYTES and len(packet) - end == head.length and not head.context.trace:
            if len(self._heads) >= _MAX_KNOWN:
                self._heads.clear()
            self._heads[packet[:end]] = head

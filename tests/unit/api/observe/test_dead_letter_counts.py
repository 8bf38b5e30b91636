"""Dead letters by version: what is read again, and when."""

from qinfer.queue.dead_letters import DeadLetter, DeadLetters
from qinfer.queue.entries import Lane
from qinfer_api.observe.reporting import DeadLetterCounts


class Letters(DeadLetters):
    """The dead letters of one model.

    Attributes:
        kept: They.
        read: How many letters were handed out.
    """

    def __init__(self) -> None:
        self.kept: list[DeadLetter] = []
        self.read = 0
        self._next = 0

    def bury(self, version: int, count: int = 1) -> None:
        for _ in range(count):
            self._next += 1
            lane = Lane("m", version)
            letter = DeadLetter(
                id=f"{self._next}-0", lane=lane, request_id="", code="", reason="", deliveries=1, buried_at=0.0
            )
            self.kept.append(letter)

    async def count(self, model: str) -> int:
        return len(self.kept) if model == "m" else 0

    async def list(self, model: str, *, after: str = "", count: int = 100) -> "list[DeadLetter]":
        place = int(after.partition("-")[0] or 0)
        page = [letter for letter in self.kept if model == "m" and int(letter.id.partition("-")[0]) > place][:count]
        self.read += len(page)
        return page


async def test_letters_are_read_once() -> None:
    """A scrape reads what has come since the last."""
    letters = Letters()
    counts = DeadLetterCounts(letters)
    letters.bury(1, 3)
    letters.bury(2)
    assert await counts.read(["m", "other"]) == {("m", 1): 3, ("m", 2): 1}
    letters.bury(2)

    assert await counts.read(["m", "other"]) == {("m", 1): 3, ("m", 2): 2}
    assert letters.read == 5


async def test_letters_that_have_gone_are_noticed() -> None:
    """Even if as many have come."""
    letters = Letters()
    counts = DeadLetterCounts(letters)
    letters.bury(1, 2)
    await counts.read(["m"])
    del letters.kept[0]
    letters.bury(2)

    assert await counts.read(["m"]) == {("m", 1): 1, ("m", 2): 1}
    letters.kept.clear()
    assert await counts.read(["m"]) == {}
    letters.bury(3)
    assert await counts.read(["m"]) == {("m", 3): 1}


async def test_too_many_to_be_read_at_once() -> None:
    """All are counted; the versions of the rest become known at the next scrapes."""
    letters = Letters()
    counts = DeadLetterCounts(letters)
    letters.bury(1, 600)

    assert await counts.read(["m"]) == {("m", 1): 500, ("m", 0): 100}
    assert await counts.read(["m"]) == {("m", 1): 600}

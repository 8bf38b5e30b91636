"""How many dead letters wait, by model version, for `/metrics`.

The queue keeps those of all versions of a model together, and tells only how many there are. So what was read of them
is remembered: a scrape reads those that have come since, and all of them again only after some have gone.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

from qinfer.queue.dead_letters import DeadLetters

_PAGE = 20  # the queue looks at them one by one, large as they may be, and does nothing else meanwhile
_PAGES = 25
"""So many pages of a model's letters are read at a scrape at most; of the rest the version is not known yet."""


class _Known:
    """What was read of a model's dead letters: the last one's id, and how many there were of each version."""

    def __init__(self) -> None:
        self.last = ""
        self.versions: Counter[int] = Counter()


class LetterCounts:
    """See the module docstring.

    Args:
        letters: The dead letters.
    """

    def __init__(self, letters: DeadLetters) -> None:
        self._letters = letters
        self._known: dict[str, _Known] = {}

    async def read(self, models: Iterable[str]) -> dict[tuple[str, int], int]:
        """Counts the dead letters of some models by (model, version); version 0 = it is not known yet.

        Raises:
            BrokerUnavailable: The queue can't be reached.
        """
        names = list(models)
        counts = await asyncio.gather(*(self._letters.count(name) for name in names))
        found: dict[tuple[str, int], int] = {}
        for name, versions in zip(names, await asyncio.gather(*map(self._of, names, counts)), strict=True):
            found.update({(name, version): count for version, count in versions.items()})
        return found

    async def _of(self, model: str, count: int) -> Counter[int]:
        if not count:
            self._known.pop(model, None)
            return Counter()
        known = await self._read_on(model, self._known.get(model) or _Known())
        if known.versions.total() > count:  # some have gone, and it does not say which
            known = await self._read_on(model, _Known())
        self._known[model] = known
        versions = +known.versions
        if count > versions.total():
            versions[0] = count - versions.total()
        return versions

    async def _read_on(self, model: str, before: _Known) -> _Known:
        known = _Known()
        known.last, known.versions = before.last, before.versions.copy()
        for _ in range(_PAGES):
            page = await self._letters.list(model, after=known.last, count=_PAGE)
            known.versions.update(letter.lane.version for letter in page)
            if page:
                known.last = page[-1].id
            if len(page) < _PAGE:
                break
        return known

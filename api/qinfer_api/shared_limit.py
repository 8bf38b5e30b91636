"""A number of places that tenants share at a gateway, such as long polls: none of them takes those of all others.

A tenant gets a place while it has fewer than are free (*dynamic thresholds*: Choudhury and Hahne, "Dynamic queue length
thresholds for shared-memory packet switches", 1998). One that takes all it can has half of them, two have a third each,
and as many as each has stay free for the next. Nothing is reserved for tenants that do not ask.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator


class SharedLimit:
    """The places that are taken; used by one event loop.

    Attributes:
        taken: How many there are.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, most: int, tenant: str) -> bool:
        """Tells whether a tenant may take one more place.

        Args:
            most: How many places there are.
            tenant: Who asks; empty = who shares them with no others, and may take all.
        """
        free = most - self.taken
        return free > (self._by_tenant[tenant] if tenant else 0)

    def take(self, tenant: str) -> None:
        """Takes a place."""
        self.taken += 1
        self._by_tenant[tenant] += 1

    def give_back(self, tenant: str) -> None:
        """Frees a place that the tenant has taken."""
        self.taken -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextlib.contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Takes a place within the block."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)

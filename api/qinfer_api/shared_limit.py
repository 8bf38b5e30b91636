"""A limit that tenants share at a gateway, without one using it up.

A tenant gets a place while it has fewer places than are free (*dynamic thresholds*: Choudhury and Hahne, "Dynamic queue
length thresholds for shared-memory packet switches", 1998): one greedy tenant gets half of them, two a third each.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator


class SharedLimit:
    """The places in use; for one event loop."""

    def __init__(self) -> None:
        self.taken = 0
        self._by_tenant: Counter[str] = Counter()

    def has_room(self, most: int, tenant: str) -> bool:
        """Returns whether a tenant may take a place; callers without a tenant may take all places."""
        free = most - self.taken
        return free > (self._by_tenant[tenant] if tenant else 0)

    def take_place(self, tenant: str) -> None:
        """Takes a place."""
        self.taken += 1
        self._by_tenant[tenant] += 1

    def free_place(self, tenant: str) -> None:
        """Frees a place of the tenant."""
        self.taken -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    @contextlib.contextmanager
    def place(self, tenant: str) -> Iterator[None]:
        """Takes a place during the block."""
        self.take_place(tenant)
        try:
            yield
        finally:
            self.free_place(tenant)

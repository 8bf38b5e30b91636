"""The audit log: administrative changes and refused keys. No setting turns it off."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from qinfer.errors import QinferError
from qinfer.observe.logs import AUDIT
from qinfer_api.auth import CallerContext

logger = logging.getLogger(AUDIT)

MOST_A_SECOND = 10
"""Lines a second per reason; further lines are only counted."""


@contextmanager
def administrative(context: CallerContext, act: str, where: str, peer: str) -> Iterator[None]:
    """Logs an administrative act at its end; `act` is the HTTP method or `gRPC`, `where` the path or method."""
    outcome = "done"
    try:
        yield
    except QinferError as error:
        outcome = error.code
        raise
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        key = "" if context.principal is None else context.principal.key_id
        about = {"tenant": context.tenant, "key": key, "act": act, "path": where, "peer": peer, "outcome": outcome}
        logger.info("administrative act", extra=about)


class RefusedKeys:
    """Logs up to `MOST_A_SECOND` refused keys per reason; for one event loop."""

    def __init__(self, second_s: float = 1.0) -> None:
        self._second_s = second_s
        self._seen: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reason: str, key: str, peer: str) -> None:
        """Logs a refusal, of reason `missing`, `unknown`, `expired`, `revoked` or `scope`."""
        self._seen[reason] += 1
        if self._seen[reason] <= MOST_A_SECOND:
            logger.warning("key refused", extra={"reason": reason, "key": key, "peer": peer})
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._second_s, self._log_refused)

    def _log_refused(self) -> None:
        self._timer = None
        for reason, count in self._seen.items():
            if count > MOST_A_SECOND:
                logger.warning("keys refused", extra={"reason": reason, "without_a_line": count - MOST_A_SECOND})
        self._seen.clear()

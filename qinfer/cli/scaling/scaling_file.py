"""The file to which an autoscaler adds what it saw and decided: `qinfer autoscale --record`."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from qinfer.errors import SettingsError
from qinfer.models.work import VersionWork
from qinfer.scaling.policy import Decision, Observation, Version
from qinfer.scaling.record import Moment, VersionTrace, encode


class ScalingFile:
    """A file that grows by a line at each look; opened for each, so that it may be rotated.

    Args:
        path: The file; what is in it stays.

    Raises:
        SettingsError: It can't be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset_s = time.time() - time.monotonic()
        self._told: dict[Version, int] = {}
        self._is_broken = False
        try:
            with path.open("ab"):
                pass
        except OSError as error:
            raise SettingsError(
                f"QINFER_AUTOSCALE__RECORD={path} can't be written: {error.strerror}; name a file that is ours"
            ) from None

    def add(
        self,
        seen: Observation,
        decision: Decision,
        *,
        before: int,
        draining: int,
        work: Iterable[VersionWork],
        rows: Mapping[Version, int],
    ) -> str:
        """Adds a line; versions of which nothing waits and nothing was executed since the last one are left out of it.

        Args:
            seen: What was seen.
            decision: What was decided.
            before: How many workers there should have been until then.
            draining: Workers that end what they have in hand.
            work: The work of each version.
            rows: Rows that were executed so far, of each version.

        Returns:
            Why it can't be written, if the line before could be; else empty.
        """
        versions = []
        for one in work:
            key = (one.model, one.version)
            executed = rows.get(key, 0)
            if one.rows or self._told.get(key) != executed:
                versions.append(
                    VersionTrace(
                        model=one.model,
                        version=one.version,
                        requests=one.requests,
                        rows=one.rows,
                        executed=executed,
                        rows_per_s=round(one.rows_per_s, 3),
                    )
                )
        moment = Moment.of(
            seen.now_s + self._offset_s, seen, decision, before=before, draining=draining, versions=tuple(versions)
        )
        was_broken = self._is_broken
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(encode(moment))
        except OSError as error:
            self._is_broken = True
            return "" if was_broken else error.strerror or "unknown"
        self._is_broken = False
        self._told.update({(one.model, one.version): one.executed for one in versions})
        return ""

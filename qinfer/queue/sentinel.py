"""Asks Sentinels where the primary is.

Each question begins at another Sentinel: one that is cut off from the others may name a primary that is none any more.
Whether the node that was named is a primary, `Link` asks the node itself.
"""

import asyncio

from qinfer.core.settings import RedisSettings
from qinfer.errors import BrokerUnavailable, QinferError, SettingsError
from qinfer.queue.address import Address, Sentinels
from qinfer.queue.connection import Refused, open_connection


class SentinelResolver:
    """Where the primary is now; `resolve` is a `Link`'s.

    Args:
        sentinels: Whom to ask.
        settings: Their password, and how long a primary's connection may take: they share it.
    """

    def __init__(self, sentinels: Sentinels, settings: RedisSettings) -> None:
        self._sentinels = sentinels
        self._settings = settings
        self._timeout_s = settings.connect_timeout_s / (2 * len(sentinels.places))
        self._first = 0

    async def resolve(self) -> Address:
        """Returns the primary's address.

        Raises:
            BrokerUnavailable: No Sentinel answers.
            SettingsError: Those that answer know no service of this name, or refuse the password.
        """
        places = self._sentinels.places
        self._first += 1
        problem: QinferError = BrokerUnavailable("no Sentinel answers; try again")
        for number in range(len(places)):
            host, port = places[(self._first + number) % len(places)]
            try:
                async with asyncio.timeout(self._timeout_s):
                    found = await self._ask(host, port)
            except (OSError, QinferError) as error:  # TimeoutError is an OSError
                if isinstance(error, SettingsError):
                    problem = error
                continue
            if found is not None:
                return self._sentinels.node.at(*found)
            problem = SettingsError(
                f"QINFER_REDIS__URL: the Sentinels know no service '{self._sentinels.service}'; "
                "use the name in their `sentinel monitor` line"
            )
        raise problem

    async def _ask(self, host: str, port: int) -> tuple[str, int] | None:
        place = Address(host=host, port=port, tls=self._sentinels.node.tls)
        connection = await open_connection(place, self._settings, self._timeout_s)
        try:
            if password := self._settings.sentinel_password.get_secret_value():
                await connection.call(b"AUTH", password)
            found = await connection.call(b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", self._sentinels.service)
        except Refused as error:
            if "AUTH" in error.message:
                raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels ask for none") from None
            raise SettingsError("QINFER_REDIS__URL: what answers there is no Sentinel; check the ports") from None
        except SettingsError:
            raise SettingsError("QINFER_REDIS__SENTINEL_PASSWORD: the Sentinels refuse it, or ask for one") from None
        finally:
            connection.abort()
        return (found[0].decode(), int(found[1])) if found else None

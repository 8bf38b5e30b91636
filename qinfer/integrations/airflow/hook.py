"""Airflow's connection to a gateway: its URL and API key become a client."""

from typing import Any

from airflow.sdk import BaseHook

from qinfer.client import AsyncClient, Client
from qinfer.errors import InvalidRequest, QinferError

DEFAULT_CONNECTION = "qinfer_default"
TIMEOUT_S = 300.0
"""The time limit of a call; the gateway reads a job's files before it accepts the job."""
TEST_TIMEOUT_S = 10.0
"""The time limit of a connection test, which a user waits for."""


class QinferHook(BaseHook):
    """Makes clients from a connection of the type `qinfer`.

    The connection's host is the gateway's URL, such as `https://gateway.example`, or a host name with the protocol as
    the schema (default `http`). The port is optional, and the password is the API key.
    """

    conn_name_attr = "qinfer_conn_id"
    default_conn_name = DEFAULT_CONNECTION
    conn_type = "qinfer"
    hook_name = "qinfer"

    def __init__(self, qinfer_conn_id: str = DEFAULT_CONNECTION) -> None:
        super().__init__()
        self.qinfer_conn_id = qinfer_conn_id

    def get_conn(self) -> Client:
        """Returns a client, which the caller closes; raises `InvalidRequest` for a connection without a valid URL."""
        return self._client(TIMEOUT_S)

    async def get_async_conn(self) -> AsyncClient:
        """Returns a client for coroutines; raises as `get_conn`."""
        connection = await self.aget_connection(self.qinfer_conn_id)
        return AsyncClient(_url_of(connection), api_key=connection.password or "", timeout_s=TIMEOUT_S)

    def test_connection(self) -> tuple[bool, str]:
        """Returns whether a gateway answers and accepts the key, and the error if not."""
        try:
            with self._client(TEST_TIMEOUT_S) as client:
                client.jobs(limit=1)
        except QinferError as error:
            return False, error.message
        return True, "the gateway answers"

    def _client(self, timeout_s: float) -> Client:
        connection = self.get_connection(self.qinfer_conn_id)
        return Client(_url_of(connection), api_key=connection.password or "", timeout_s=timeout_s)

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Returns the names of the fields in Airflow's form for connections."""
        return {
            "hidden_fields": ["login", "extra"],
            "relabeling": {"host": "Gateway URL", "password": "API key"},
            "placeholders": {"host": "https://gateway.example"},
        }


def _url_of(connection: Any) -> str:
    if not connection.host:
        raise InvalidRequest(f"connection '{connection.conn_id}' has no host; name the gateway, such as http://gateway")
    url = connection.host if "://" in connection.host else f"{connection.schema or 'http'}://{connection.host}"
    return f"{url}:{connection.port}" if connection.port else str(url)

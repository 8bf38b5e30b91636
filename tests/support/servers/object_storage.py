"""A server that speaks S3's protocol, on loopback, in this process; stopped and started, it still has its objects."""

import logging
import urllib.request
from typing import Self
from xml.etree import ElementTree

import boto3  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

from tests.support.servers.servers import free_port, is_listening, wait_until

BUCKET = "payloads"
_S3 = "{http://s3.amazonaws.com/doc/2006-03-01/}"


class ObjectStorage:
    """An S3 server with one bucket."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self.port = free_port()
        self.start()
        self._ask("/moto-api/reset", "POST")
        self._ask(f"/{BUCKET}", "PUT")

    @property
    def environment(self) -> dict[str, str]:
        """What programs need to reach it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()
        wait_until(lambda: not is_listening(self.port))

    def names(self) -> list[str]:
        """Returns the names of the objects in the bucket."""
        listing = ElementTree.fromstring(self._ask(f"/{BUCKET}?list-type=2", "GET"))
        return [key.text or "" for key in listing.iter(f"{_S3}Key")]

    def delete(self, name: str) -> None:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.delete_object(Bucket=BUCKET, Key=name)
        client.close()

    def _ask(self, path: str, method: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=20) as reply:
            return bytes(reply.read())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

"""An upgrade to steps in the lanes of owners, and its way back: no step is lost, refused or executed twice.

The earlier version is the last one whose steps were all told by tickets.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import python_models
from tests.support.installation import Installation, earlier_version
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

FIRST_FILE = "docs/explanation/decisions/0042-steps-in-owners-lanes.md"
MODEL = "sums"
STEPS = 12


class Site:
    """A queue, and programs of both versions."""

    def __init__(self, directory: Path, url: str, stack: ExitStack) -> None:
        self._old = earlier_version(directory / "earlier", FIRST_FILE)
        python_models.write_accumulator(directory / "models", MODEL)
        self.programs = Installation(directory, directory / "models", url)
        self._stack = stack

    def gateway(self, *, is_old: bool) -> str:
        """Starts a gateway of a version; returns its URL."""
        how = self.programs.gateway(self._old) if is_old else self.programs.gateway()
        return self._stack.enter_context(how)

    @contextmanager
    def worker(self, *, is_old: bool) -> Iterator[None]:
        """Runs a worker of a version."""
        with self.programs.worker(self._old) if is_old else self.programs.worker():
            yield


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with RedisServer(system_redis(), tmp_path, "--appendonly", "yes") as server, ExitStack() as stack:
        yield Site(tmp_path, server.url, stack)


def summed(urls: list[str], correlation_id: int, *, numbered: bool) -> list[float]:
    """Sends a sequence, each step to the next of the gateways; returns the answers."""
    answers = []
    with httpx.Client(timeout=30.0) as client:
        for step in range(1, STEPS + 1):
            flags: dict[str, Any] = {
                "sequence_id": correlation_id,
                "sequence_start": step == 1,
                "sequence_end": step == STEPS,
            }
            if numbered:
                flags["qinfer_step"] = step
            x = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [step]}
            url = f"{urls[step % len(urls)]}/v2/models/{MODEL}/infer"
            reply = client.post(url, json={"inputs": [x], "parameters": flags})
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["outputs"][0]["data"][0])
    return answers


@pytest.mark.parametrize("is_old_worker", [False, True])
def test_gateways_of_both_versions_share_sequences_at_a_worker_of_either(site: Site, *, is_old_worker: bool) -> None:
    """The steps of one sequence go through both gateways in turns."""
    with site.worker(is_old=is_old_worker):
        old, new = site.gateway(is_old=True), site.gateway(is_old=False)
        for url in (old, new):
            site.programs.serves(url, [MODEL])
        wanted = list(accumulate(range(1, STEPS + 1)))

        answers = [
            summed(urls, number + 1, numbered=number % 2 == 0)
            for number, urls in enumerate([[new], [new], [old], [old], [old, new], [old, new], [new, old], [new, old]])
        ]

    assert answers == [wanted] * 8

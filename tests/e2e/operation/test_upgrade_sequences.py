"""An upgrade to implicit states in the lanes of owners, and its way back: no step is lost, refused or executed twice.

The earlier version is the last one whose steps of implicit states were told by tickets.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import models, python_models
from tests.support.installation import Installation, earlier_version
from tests.support.servers.servers import RedisServer, system_redis

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

FIRST_FILE = "docs/explanation/decisions/0044-committed-states-in-lanes.md"
IMPLICIT, EXPLICIT = "implicit", "explicit"
NAMES = {IMPLICIT: ("INPUT", "OUTPUT"), EXPLICIT: ("x", "y")}
STEPS = 12
WANTED = list(accumulate(range(1, STEPS + 1)))


class Site:
    """A queue, and programs of both versions."""

    def __init__(self, directory: Path, url: str, stack: ExitStack) -> None:
        self._old = earlier_version(directory / "earlier", FIRST_FILE)
        python_models.write_accumulator(directory / "models", EXPLICIT)
        models.accumulator(directory / "models", IMPLICIT, more="max_sequence_idle_microseconds: 120000000")
        patience = {"QINFER_LIMITS__WAIT_FOR_WORKERS_S": "60"}
        self.programs = Installation(directory, directory / "models", url, **patience)
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


def summed(
    urls: list[str], correlation_id: int, *, numbered: bool, model: str = EXPLICIT, steps: range = range(1, STEPS + 1)
) -> list[float]:
    """Sends steps of a sequence, each to the next of the gateways; returns the answers."""
    answers = []
    given, returned = NAMES[model]
    with httpx.Client(timeout=90.0) as client:
        for step in steps:
            flags: dict[str, Any] = {
                "sequence_id": correlation_id,
                "sequence_start": step == 1,
                "sequence_end": step == STEPS,
            }
            if numbered:
                flags["qinfer_step"] = step
            x = {"name": given, "datatype": "FP32", "shape": [1, 1], "data": [step]}
            url = f"{urls[step % len(urls)]}/v2/models/{model}/infer"
            body = {"inputs": [x], "outputs": [{"name": returned}], "parameters": flags}
            reply = client.post(url, json=body)
            assert reply.status_code == 200, reply.text
            answers.append(reply.json()["outputs"][0]["data"][0])
    return answers


@pytest.mark.parametrize("model", [IMPLICIT, EXPLICIT])
@pytest.mark.parametrize("is_old_worker", [False, True])
def test_gateways_of_both_versions_share_sequences_at_a_worker_of_either(
    site: Site, model: str, *, is_old_worker: bool
) -> None:
    """The steps of one sequence go through both gateways in turns."""
    with site.worker(is_old=is_old_worker):
        old, new = site.gateway(is_old=True), site.gateway(is_old=False)
        for url in (old, new):
            site.programs.serves(url, [model])

        answers = [
            summed(urls, number + 1, numbered=number % 2 == 0, model=model)
            for number, urls in enumerate([[new], [new], [old], [old], [old, new], [old, new], [new, old], [new, old]])
        ]

    assert answers == [WANTED] * 8


@pytest.mark.parametrize("is_old_first", [True, False])
def test_open_sequences_go_on_at_a_worker_of_the_other_version(site: Site, *, is_old_first: bool) -> None:
    """The first worker drains; the steps of each sequence go through both gateways in turns."""
    early, late = range(1, STEPS // 2 + 1), range(STEPS // 2 + 1, STEPS + 1)
    with ExitStack() as second:
        with site.worker(is_old=is_old_first):
            urls = [site.gateway(is_old=True), site.gateway(is_old=False)]
            for url in urls:
                site.programs.serves(url, [IMPLICIT])
            begun = [summed(urls, n, numbered=n % 2 == 0, model=IMPLICIT, steps=early) for n in range(1, 9)]
            second.enter_context(site.worker(is_old=not is_old_first))
        ended = [summed(urls, n, numbered=n % 2 == 0, model=IMPLICIT, steps=late) for n in range(1, 9)]

    assert [one + other for one, other in zip(begun, ended, strict=True)] == [WANTED] * 8

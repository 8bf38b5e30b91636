"""The proof of what the bridge promises: whatever is killed, each message id has one distinct prediction.

Bridges, workers, Redis and the source, RabbitMQ or a list of another Redis, are killed; no message is lost or left, and
none becomes a dead letter. `make chaos` sends 20,000 messages in a fifth of its time, with a fifth of its kills; else
the run is short. `CHAOS_SEED` repeats the faults, though not their exact moment in the work.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest
import yaml

from qinfer.testing import eventually
from tests.chaos.bridge_load import PREDICTIONS, TASKS, Ledger, Sender, Taker, judge, left_in
from tests.chaos.cluster import Cluster, running_cluster
from tests.chaos.faults import Chaos, Fault, Kind
from tests.chaos.list_load import ListSender, ListServer, ListTaker, left_in_lists
from tests.chaos.member import Role
from tests.chaos.repository import write_stub
from tests.chaos.verdict import leftovers
from tests.support.servers.rabbitmq import RabbitServer, running_rabbitmq

IS_LONG = "CHAOS_SECONDS" in os.environ
SECONDS = float(os.environ.get("CHAOS_SECONDS", "45")) / 5
KILLS = round(int(os.environ.get("CHAOS_KILLS", "25")) / 5)
MESSAGES = int(os.environ.get("CHAOS_MESSAGES", "20000" if IS_LONG else "1500"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
BRIDGE = os.environ.get("CHAOS_BRIDGE", "")
"""Another program than the bridge: one that breaks its promises must be found out."""

MODEL = "paced"
WORKERS, ROWS_AT_ONCE = 2, 8
DELAY_S = WORKERS * ROWS_AT_ONCE / (1.5 * MESSAGES / SECONDS)
"""The model is so slow that messages wait everywhere for most of the time: whatever is killed holds many."""
LIST_LEASE_S = 3.0
WITHIN_S = 100.0
SETTINGS = {"QINFER_WORKER__MAX_DELIVERIES": "100", "QINFER_LOG__LEVEL": "WARNING"}

_AWAY_S = 0.5
"""So long after the source's end a bridge is killed that has predictions in hand, which nobody takes."""
_VICTIMS = (Role.BRIDGE, Role.SOURCE, Role.WORKER, Role.BRIDGE, Role.WORKER, Role.BRIDGE, Role.BROKER, Role.BRIDGE)
_OTHERS = ((Kind.STOP, Role.BRIDGE), (Kind.END, Role.BRIDGE), (Kind.END, Role.SOURCE), (Kind.CUT, Role.BROKER))

pytestmark = [pytest.mark.long, pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + WITHIN_S + 120)]


class Client(Protocol):
    """A thread that sends messages or takes predictions."""

    failure: BaseException | None

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def is_alive(self) -> bool: ...


class SendingClient(Client, Protocol):
    """A thread that sends messages, until it is done."""

    @property
    def is_done(self) -> bool: ...


@dataclass
class Scene:
    """The broker of the messages, and who uses it.

    Attributes:
        server: The broker.
        body: How the route reads bodies.
        options: Of the source.
        sender: Sends the messages.
        taker: Takes the predictions.
        left: Returns how many messages are left, by queue.
    """

    server: RabbitServer | ListServer
    body: dict[str, object]
    options: dict[str, object]
    sender: SendingClient
    taker: Client
    left: Callable[[], dict[str, int]]


@contextlib.contextmanager
def on_rabbitmq(directory: Path, ledger: Ledger) -> Iterator[Scene]:
    """Messages of RabbitMQ, with ids."""
    with running_rabbitmq(directory) as rabbit:
        sender, taker = Sender(rabbit, ledger, MESSAGES, SECONDS / 3), Taker(rabbit, ledger)
        yield Scene(rabbit, {}, {}, sender, taker, partial(left_in, rabbit))


@contextlib.contextmanager
def on_list(directory: Path, ledger: Ledger) -> Iterator[Scene]:
    """Plain messages of a Redis list, without ids or content types."""
    with ListServer(directory) as server:
        sender, taker = ListSender(server, ledger, MESSAGES, SECONDS / 3), ListTaker(server, ledger)
        body: dict[str, object] = {"columns": {"a": "a", "b": "b"}}
        yield Scene(server, body, {"visibility_timeout": LIST_LEASE_S}, sender, taker, partial(left_in_lists, server))


class BridgeChaos(Chaos):
    """Faults of which some are the source's.

    Args:
        cluster: Whose processes.
        faults: What to do, in the order of time.
        source: The broker that the messages come from.
    """

    def __init__(self, cluster: Cluster, faults: list[Fault], source: RabbitServer | ListServer) -> None:
        super().__init__(cluster, faults)
        self._source = source
        self._one_at_a_time = asyncio.Lock()

    async def _do(self, fault: Fault, stops: asyncio.TaskGroup) -> None:
        if fault.role is Role.SOURCE:
            stops.create_task(self._restart(fault.kind))  # others are killed while it is away
        else:
            await super()._do(fault, stops)

    async def _restart(self, kind: Kind) -> None:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._source.kill if kind is Kind.KILL else self._source.end)
            if kind is Kind.KILL:
                await asyncio.sleep(_AWAY_S)
                (await self._cluster.running(Role.BRIDGE, self.kills)).kill()
                self.done[f"{kind}-{Role.BRIDGE}"] += 1
            await asyncio.to_thread(self._source.start)


def plan(seed: int, seconds: float, kills: int) -> list[Fault]:
    """Returns `kills` kills spread over the time, and half as many faults of other kinds in between."""
    rng = random.Random(seed)
    victims = rng.sample(_VICTIMS, len(_VICTIMS))
    step_s = seconds / max(kills, 1)
    found = [
        Fault(step_s * (number + rng.random()), Kind.KILL, victims[number % len(victims)], rng.randrange(100))
        for number in range(kills)
    ]
    for number in range(kills // 2):
        kind, role = _OTHERS[number % len(_OTHERS)]
        found.append(Fault(rng.uniform(0, seconds), kind, role, rng.randrange(100)))
    return sorted(found, key=lambda fault: fault.at_s)


def configuration(scene: Scene) -> dict[str, object]:
    source = {"url": scene.server.url, "queue": TASKS, "prefetch": 200, "options": scene.options}
    route = {"name": "chaos", "model": MODEL, "source": source, "sink": {"routing_key": PREDICTIONS}}
    return {"retry_s": 3, "routes": [{**route, "max_waiting": 100, "body": scene.body}]}


@pytest.mark.parametrize("source", [on_rabbitmq, on_list])
async def test_each_message_has_one_prediction(
    source: Callable[[Path, Ledger], contextlib.AbstractContextManager[Scene]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever is killed; and at the end nothing is in any queue, the source's or ours."""
    write_stub(tmp_path / "models", MODEL, delay_s=DELAY_S, max_batch_size=ROWS_AT_ONCE)
    ledger = Ledger()
    with source(tmp_path / "source", ledger) as scene:
        config = tmp_path / "bridge.yaml"
        config.write_text(yaml.safe_dump(configuration(scene)))
        running = running_cluster(
            tmp_path, tmp_path / "models", gateways=1, workers=WORKERS, durability="always", settings=SETTINGS
        )
        async with running as cluster:
            await cluster.ready((MODEL,))
            for _ in range(2):
                cluster.add(Role.BRIDGE, arguments=(str(config),), module=BRIDGE)
            chaos = BridgeChaos(cluster, plan(SEED, SECONDS, KILLS), scene.server)
            await hurt(cluster, chaos, scene, ledger)
            verdict = judge(ledger, MESSAGES, scene.left(), is_correlated=source is on_rabbitmq)
            problems = verdict.problems + leftovers(cluster.keys())
            sys.stdout.writelines(f"{error}: {count}\n" for error, count in cluster.errors().items())
    with capsys.disabled():
        sys.stdout.write(f"\nCHAOS_SEED={SEED}: {source.__name__}: {verdict.line}; {dict(chaos.done)}\n")
    assert problems == [], verdict.line


async def hurt(cluster: Cluster, chaos: BridgeChaos, scene: Scene, ledger: Ledger) -> None:
    """Sends messages while the faults happen, and waits until nothing moves any more."""
    sender, taker = scene.sender, scene.taker
    sender.start()
    taker.start()
    try:
        await chaos.run()
        await eventually(lambda: sender.is_done or not sender.is_alive(), WITHIN_S, "all messages sent")
        with contextlib.suppress(TimeoutError):  # the verdict says what is missing
            await eventually(lambda: len(ledger.predictions) >= MESSAGES, WITHIN_S, "a prediction for each message")
        await cluster.quiet()
        bridges = cluster.of(Role.BRIDGE)
        for bridge in bridges:
            bridge.end_for_good()  # so that what they hold goes back to the source
        await eventually(lambda: not any(bridge.runs for bridge in bridges), WITHIN_S, "the end of all bridges")

        async def is_taken() -> bool:
            await asyncio.sleep(0.5)  # more than the taker waits for the next one
            return (await asyncio.to_thread(scene.left))[PREDICTIONS] == 0

        await eventually(is_taken, WITHIN_S, "all predictions taken")
    finally:
        sender.stop()
        taker.stop()
    assert (sender.failure, taker.failure) == (None, None)

"""Processes of two machines: each listens behind a wire that is cut in the middle of messages, or stands still."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from qinfer.segments.link import _HEAD as HEAD
from qinfer.segments.link import MessageKind
from tests.chaos.cluster import Cluster
from tests.chaos.faults import Chaos, Fault, Kind
from tests.chaos.member import Role
from tests.support.tensor_proxy import TensorProxy

WIRE_FAULTS = ((Kind.CUT, Role.WIRE), (Kind.STOP, Role.WIRE)) * 2
"""Faults of wires are about as frequent as each other kind but kills."""

_PROCESS = "127.0.0.2"
"""A process has the port of its wire at another address."""

_CAME = {"most_bytes": "fetched", "most_up": "replied"}
_STEP_BYTES = 2_000
_BYTES_WITHIN_S = 4.0


class Chunks:
    """Counts what comes whole in one direction of a connection; `came` is called for each."""

    def __init__(self, came: Callable[[], None]) -> None:
        self._came = came
        self._head = b""
        self._rest = 0
        self._left: dict[int, int] = {}

    def add(self, data: bytes) -> None:
        """Takes the next bytes."""
        while data:
            skipped = min(self._rest, len(data))
            self._rest -= skipped
            begin = HEAD.size - len(self._head)
            self._head += data[skipped : skipped + begin]
            data = data[skipped + begin :]
            if len(self._head) == HEAD.size:
                self._begin(*HEAD.unpack(self._head))
                self._head = b""

    def _begin(self, nbytes: int, whole: int, number: int, kind: int) -> None:
        self._rest = nbytes
        if kind == MessageKind.CHUNK:
            left = self._left.pop(number, whole) - nbytes
            if left:
                self._left[number] = left
            else:
                self._came()


class Wire(TensorProxy):
    """The network to one process; `counts` has what came whole."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__((_PROCESS, 0))
        self._counts = counts
        self.turn = asyncio.Lock()

    def watcher(self, bound: str) -> Callable[[bytes], None]:
        """See `TensorProxy.watcher`."""
        return Chunks(lambda: self._counts.update([_CAME[bound]])).add


class Network:
    """All wires.

    Attributes:
        counts: Tensors that were `fetched`, and replies that were sent (`replied`), between machines.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self._wires: list[Wire] = []

    async def listening(self) -> dict[str, str]:
        """Returns the settings of one more process, which listens behind a wire of its own."""
        wire = Wire(self.counts)
        host, _, port = (await wire.start()).rpartition(":")
        wire.target = _PROCESS, int(port)
        self._wires.append(wire)
        names = {"LISTEN_HOST": _PROCESS, "LISTEN_PORT": port, "ADVERTISE_HOST": host}
        return {f"QINFER_SEGMENTS__{name}": value for name, value in names.items()}

    async def hurt(self, fault: Fault) -> None:
        """Cuts a wire's connections, or stops them for a while, after so many bytes, or with the next ones."""
        turn, which = divmod(fault.pick, len(self._wires))
        wire, bound = self._wires[which], "most_bytes" if turn % 3 else "most_up"
        async with wire.turn:
            wire.reached.clear()
            wire.stalls = fault.kind is Kind.STOP
            for most in (fault.pick * _STEP_BYTES, 0):
                setattr(wire, bound, most)
                with suppress(TimeoutError):
                    await asyncio.wait_for(wire.reached.wait(), _BYTES_WITHIN_S)
                    break
            if wire.stalls:
                await asyncio.sleep(fault.stop_s)
            wire.go_on()

    async def aclose(self) -> None:
        """Ends all connections."""
        for wire in self._wires:
            await wire.close()


class NetworkChaos(Chaos):
    """Faults of which some are the network's."""

    def __init__(self, cluster: Cluster, faults: list[Fault], network: Network) -> None:
        super().__init__(cluster, faults)
        self._network = network

    async def _do(self, fault: Fault, stops: asyncio.TaskGroup) -> None:
        if fault.role is Role.WIRE:
            stops.create_task(self._network.hurt(fault))
        else:
            await super()._do(fault, stops)

"""What a run measures: scenes of servers that run side by side, their loads, and how many clean turns each needs."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from benchmarks import stateful
from benchmarks.bars import CEILING, FASTAPI, FASTAPI_ORJSON, MOSEC, MOSEC_ORJSON, QINFER, TRITON
from benchmarks.bodies import BINARY, GRPC, JSON, SHM
from benchmarks.models import SCRIPT, SCRIPT_IMAGE, THREADS
from benchmarks.proxied import CONNECTIONS, GRPC_PROXIED, JSON_PROXIED
from benchmarks.results import BATCH, CLEAN, IN_PROCESS, Sample, Setting

TURN_S = 2.0
WARM_UP_S = 1.0
STATEFUL_TURNS = 6
# As measured on two cores: a turn besides its load, the same with callers in Python, and a start with its check.
OVERHEAD_S, CALLERS_OVERHEAD_S, START_S = 0.3, 1.5, 5.0

Turns = Mapping[str, int]
"""Server → clean turns that it needs."""
PAIR: Turns = {QINFER: 9, TRITON: 9}
FEW: Turns = {QINFER: 5, TRITON: 5}
FAST: Turns = {**PAIR, MOSEC_ORJSON: 9}
_OTHERS: Turns = {FASTAPI: 5, FASTAPI_ORJSON: 5, MOSEC: 5, "litserve": 3, "celery": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load of a scene.

    Attributes:
        connections: Concurrent connections.
        turns: The servers that have it, with the turns that they need.
        streams: Concurrent calls of each connection.
        fresh: Each request opens a connection of its own.
        batches: Batch sizes of the network in process, which takes turns with the servers.
    """

    connections: int
    turns: Turns
    streams: int = 1
    fresh: bool = False
    batches: tuple[int, ...] = ()

    def settings(self, model: str, encoding: str) -> dict[Setting, int]:
        """Returns the settings with the turns that they need, the fast servers side by side."""
        one = Setting(
            model=model,
            encoding=encoding,
            connections=self.connections,
            streams=self.streams,
            fresh=self.fresh,
            server=QINFER,
        )
        loops = {
            Setting(model=model, encoding=BATCH, connections=batch, server=IN_PROCESS): min(5, max(self.turns.values()))
            for batch in self.batches
        }
        return {**{replace(one, server=name): turns for name, turns in self.turns.items()}, **loops}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Servers that run side by side with one model, asked in one encoding."""

    model: str
    encoding: str
    loads: tuple[Load, ...]

    @property
    def servers(self) -> list[str]:
        """The names of the servers, in the order of the loads."""
        return list(dict.fromkeys(name for load in self.loads for name in load.turns))


SCENES = (
    Scene(
        model="tiny",
        encoding=JSON,
        loads=(
            Load(connections=1, turns={**FAST, **_OTHERS}),
            Load(connections=64, turns={**FAST, **_OTHERS}),
            Load(connections=128, turns={**FAST, FASTAPI: 5, MOSEC: 5}),
            Load(connections=256, turns=FAST),
            Load(connections=1000, turns=FAST),
            Load(connections=64, turns=FAST, fresh=True),
        ),
    ),
    Scene(
        model="tiny",
        encoding=GRPC,
        loads=(
            *(Load(connections=connections, turns=PAIR) for connections in (1, 64, 128)),
            Load(connections=4, streams=16, turns=FEW),
        ),
    ),
    Scene(model="tiny", encoding=BINARY, loads=(Load(connections=64, turns=FEW),)),
    Scene(model="tiny", encoding=JSON_PROXIED, loads=(Load(connections=CONNECTIONS, turns=PAIR),)),
    Scene(model="tiny", encoding=GRPC_PROXIED, loads=(Load(connections=CONNECTIONS, turns=PAIR),)),
    Scene(
        model=SCRIPT,
        encoding=JSON,
        loads=(Load(connections=64, turns=PAIR), Load(connections=128, turns=PAIR)),
    ),
    Scene(model="mlp", encoding=JSON, loads=(Load(connections=128, turns={**FAST, MOSEC: 5}),)),
    Scene(
        model="mlp",
        encoding=BINARY,
        loads=(Load(connections=64, turns={QINFER: 5}), Load(connections=128, turns=PAIR, batches=(64,))),
    ),
    Scene(model="mlp", encoding=GRPC, loads=(Load(connections=128, turns=PAIR),)),
    Scene(model="conv", encoding=BINARY, loads=(Load(connections=32, turns=PAIR, batches=(1, 32, 64)),)),
    *(
        Scene(model=model, encoding=encoding, loads=tuple(Load(connections=many, turns=turns) for many in (1, 16, 64)))
        for model in ("embedding", "patch", "image", "frames", "mask", "photo")
        for encoding, turns in ((BINARY, {**FEW, CEILING: 5}), (GRPC, FEW), (SHM, FEW))
    ),
    Scene(model=SCRIPT_IMAGE, encoding=BINARY, loads=(Load(connections=64, turns=FEW),)),
)
GROUPS = stateful.GROUPS
MODELS = tuple(dict.fromkeys([*(scene.model for scene in SCENES), *GROUPS]))
ENCODINGS = tuple(dict.fromkeys(scene.encoding for scene in SCENES))
SERVERS = tuple(dict.fromkeys([*SCENES[0].servers, CEILING, IN_PROCESS]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        scenes: The scenes of stateless models.
        groups: Groups of `stateful`, with the encodings and servers that they are measured with.
        seconds: Length of a turn; those of groups have half of it.
        is_complete: Nothing was left out or made shorter.
    """

    scenes: tuple[Scene, ...] = SCENES
    groups: tuple[stateful.Group, ...] = tuple(stateful.group(name, STATEFUL_TURNS) for name in stateful.GROUPS)
    seconds: float = TURN_S
    is_complete: bool = True

    @property
    def needed(self) -> dict[Setting, int]:
        """The clean turns that each setting needs."""
        needed: dict[Setting, int] = {}
        for scene in self.scenes:
            for load in scene.loads:
                needed |= load.settings(scene.model, scene.encoding)
        for group in self.groups:
            needed |= dict.fromkeys(group.settings, group.turns)
        return needed

    @property
    def turns(self) -> int:
        """The number of turns."""
        return sum(self.needed.values())

    @property
    def estimate_s(self) -> float:
        """How long the run takes if no turn is disturbed."""
        slow = sum(len(group.settings) * group.turns for group in self.groups)
        starts = sum(len(scene.servers) for scene in self.scenes) + sum(len(group.servers) for group in self.groups)
        turns_s = (self.turns - slow) * (self.seconds + OVERHEAD_S) + slow * (self.seconds / 2 + CALLERS_OVERHEAD_S)
        return turns_s + starts * (START_S + 2 * WARM_UP_S)

    def __str__(self) -> str:
        return (
            f"turns of {self.seconds:g} s, those of {', '.join(GROUPS)} of {self.seconds / 2:g} s; "
            f"one worker process and {THREADS} ONNX Runtime thread everywhere; no server waits for a batch to fill"
        )


def finished(plan: Plan, samples: Iterable[Sample]) -> set[Setting]:
    """Returns the settings of loads and groups that need no more turns: settings that are compared stay together."""
    clean = Counter(sample.setting for sample in samples if sample.lost <= CLEAN and sample.rate)
    together = [load.settings(scene.model, scene.encoding) for scene in plan.scenes for load in scene.loads]
    together += [dict.fromkeys(group.settings, group.turns) for group in plan.groups]
    whole = [one for one in together if all(clean[setting] >= turns for setting, turns in one.items())]
    return {setting for one in whole for setting in one}


def without(plan: Plan, done: AbstractSet[Setting]) -> Plan:
    """Returns a plan without the loads and groups that are finished."""

    def left(scene: Scene) -> tuple[Load, ...]:
        return tuple(one for one in scene.loads if not one.settings(scene.model, scene.encoding).keys() <= done)

    return replace(
        plan,
        scenes=tuple(replace(scene, loads=left(scene)) for scene in plan.scenes if left(scene)),
        groups=tuple(group for group in plan.groups if not done >= {*group.settings}),
    )


def restricted(plan: Plan, keep: Callable[[Setting], bool], turns: int) -> Plan:
    """Returns a plan without the settings that are not kept, and with at most so many turns of each."""

    def shortened(scene: Scene) -> Iterator[Load]:
        for load in scene.loads:
            settings = load.settings(scene.model, scene.encoding)
            kept = {one.server: min(count, turns) for one, count in settings.items() if keep(one)}
            loops = kept.pop(IN_PROCESS, None)
            if kept:
                yield replace(load, turns=kept, batches=load.batches if loops else ())

    scenes = tuple(replace(scene, loads=tuple(shortened(scene))) for scene in plan.scenes)
    groups = tuple(
        replace(
            group,
            turns=min(group.turns, turns),
            settings=tuple(one for one in group.settings if keep(replace(one, model=group.name))),
        )
        for group in plan.groups
    )
    small = replace(
        plan,
        scenes=tuple(scene for scene in scenes if scene.loads),
        groups=tuple(group for group in groups if group.settings),
    )
    return replace(small, is_complete=plan.is_complete and small.needed == plan.needed)

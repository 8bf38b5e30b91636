"""The bars that the measurements must clear, and the verdict on each: pure, and never kinder than the figures."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.bodies import BINARY, GRPC, JSON, SHM
from benchmarks.models import MODELS
from benchmarks.proxied import GRPC_PROXIED, JSON_PROXIED
from benchmarks.results import BATCH, IN_PROCESS, Row, Rows, Setting

QINFER, TRITON, CEILING = "qinfer", "triton", "ceiling"
FASTAPI, FASTAPI_ORJSON = "fastapi_direct", "fastapi_orjson"
MOSEC, MOSEC_ORJSON = "mosec", "mosec_orjson"
"""A peer as it is documented, and with its JSON replaced: the bars are judged against both."""


class Outcome(StrEnum):
    """What became of a bar."""

    PASS = "PASS"
    MISS = "MISS"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A bar, what became of it, and the figures that say so."""

    bar: str
    outcome: Outcome
    figures: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBar:
    """qinfer's rate must be at least `factor` times that of `against`.

    `against` is one setting, or several of which the fastest counts.
    """

    bar: str
    ours: Setting
    against: tuple[Setting, ...]
    factor: float

    def judge(self, rows: Rows) -> Verdict:
        """Compares turn by turn; an invalid row is a miss, a missing one is not measured."""
        ours, theirs = rows.get(self.ours), [rows[setting] for setting in self.against if setting in rows]
        if ours is None or not theirs:
            return Verdict(bar=self.bar, outcome=Outcome.UNKNOWN, figures="")
        best = max(theirs, key=lambda row: row.rate)
        if not (ours.valid and best.valid):
            return _invalid(self.bar, ours, best)
        ratio = ours.times(best)
        figures = f"{ours.rate:,.0f}/s against {best.rate:,.0f}/s = {ratio} x"
        return Verdict(bar=self.bar, outcome=_outcome(passed=ratio.value >= self.factor), figures=figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBar:
    """A figure of qinfer, such as a latency, must be at most `factor` times that of `against`.

    `figure` reads it, and `unit` is what it is printed with.
    """

    bar: str
    ours: Setting
    against: Setting
    factor: float
    figure: Callable[[Row], float]
    unit: str

    def judge(self, rows: Rows) -> Verdict:
        """Compares the medians; an invalid row is a miss, a missing one is not measured."""
        ours, theirs = rows.get(self.ours), rows.get(self.against)
        if ours is None or theirs is None:
            return Verdict(bar=self.bar, outcome=Outcome.UNKNOWN, figures="")
        if not (ours.valid and theirs.valid):
            return _invalid(self.bar, ours, theirs)
        mine, other = self.figure(ours), self.figure(theirs)
        ratio = mine / other if other else float("inf")
        figures = f"{mine:.2f} {self.unit} against {other:.2f} {self.unit} = {ratio:.2f} x"
        return Verdict(bar=self.bar, outcome=_outcome(passed=ratio <= self.factor), figures=figures)


def judge(rows: Rows) -> list[Verdict]:
    """Judges every bar: rates, latency of a lone caller, what ids cost, tails."""
    return [*(bar.judge(rows) for bar in (*RATE_BARS, *COST_BARS)), *_tails(rows)]


def _setting(server: str, model: str, encoding: str, connections: int, streams: int = 1) -> Setting:
    return Setting(model=model, encoding=encoding, connections=connections, streams=streams, server=server)


def _bar(bar: str, factor: float, ours: tuple[str, str, int], against: tuple[str, str, int], server: str) -> RateBar:
    return RateBar(bar=bar, ours=_setting(QINFER, *ours), against=(_setting(server, *against),), factor=factor)


def _faster_than_triton(
    where: str, factor: float, model: str, encoding: str, connections: int, streams: int = 1
) -> RateBar:
    ours, theirs = (_setting(server, model, encoding, connections, streams) for server in (QINFER, TRITON))
    return RateBar(bar=f"{where}: ≥ {factor:g} x Triton", ours=ours, against=(theirs,), factor=factor)


_NAMES = {JSON: "JSON", GRPC: "gRPC", BINARY: "binary", SHM: "shared memory"}
_LARGE = ("embedding", "patch", "image", "frames", "mask")
_TENSORS = {
    **{(model, BINARY): 2.0 for model in _LARGE},
    **{(model, GRPC): 1.5 for model in _LARGE},
    **{(model, SHM): 2.0 for model in _LARGE},
    ("embedding", BINARY): 1.2,
    ("patch", BINARY): 1.5,
    **{("photo", encoding): 1.1 for encoding in (BINARY, GRPC, SHM)},
}
"""How many times Triton's rate is the goal at 16 and 64 connections, by model and encoding."""
_TINY_64, _TINY_128, _MLP_128 = ("tiny", "json", 64), ("tiny", "json", 128), ("mlp", "json", 128)

RATE_BARS = (
    _bar("tiny JSON, 64 connections: ≥ 4 x FastAPI direct", 4.0, _TINY_64, _TINY_64, FASTAPI),
    _bar("tiny JSON, 64 connections: ≥ 4 x FastAPI direct with orjson", 4.0, _TINY_64, _TINY_64, FASTAPI_ORJSON),
    _bar("tiny JSON, 64 connections: ≥ 1.1 x mosec", 1.1, _TINY_64, _TINY_64, MOSEC),
    _bar("tiny JSON, 64 connections: ≥ 1.1 x mosec with orjson", 1.1, _TINY_64, _TINY_64, MOSEC_ORJSON),
    _bar("tiny JSON, 128 connections: ≥ 1.2 x mosec", 1.2, _TINY_128, _TINY_128, MOSEC),
    _bar("tiny JSON, 128 connections: ≥ 1.2 x mosec with orjson", 1.2, _TINY_128, _TINY_128, MOSEC_ORJSON),
    _bar("mlp JSON, 128 connections: ≥ 2 x mosec", 2.0, _MLP_128, _MLP_128, MOSEC),
    _bar("mlp JSON, 128 connections: ≥ 2 x mosec with orjson", 2.0, _MLP_128, _MLP_128, MOSEC_ORJSON),
    _bar(
        "mlp binary, 128 connections: ≥ 0.8 x in process at batch 64",
        0.8,
        ("mlp", "binary", 128),
        ("mlp", BATCH, 64),
        IN_PROCESS,
    ),
    RateBar(
        bar="conv binary, 32 connections: ≥ 0.9 x in process at its best batch size",
        ours=_setting(QINFER, "conv", "binary", 32),
        against=tuple(_setting(IN_PROCESS, "conv", BATCH, batch) for batch in (1, 32, 64)),
        factor=0.9,
    ),
    _faster_than_triton("tiny gRPC, 64 connections", 1.2, "tiny", GRPC, 64),
    _faster_than_triton("tiny gRPC, 128 connections", 1.2, "tiny", GRPC, 128),
    _faster_than_triton("tiny gRPC, 4 connections of 16 calls", 1.2, "tiny", GRPC, 4, 16),
    _faster_than_triton("mlp gRPC, 128 connections", 1.2, "mlp", GRPC, 128),
    _faster_than_triton("tiny gRPC as behind a proxy", 1.0, "tiny", GRPC_PROXIED, 64),
    _faster_than_triton("conv binary, 32 connections", 1.1, "conv", BINARY, 32),
    *(
        _faster_than_triton(f"{model} {_NAMES[encoding]}, {many} connections", factor, model, encoding, many)
        for (model, encoding), factor in _TENSORS.items()
        for many in (16, 64)
    ),
    *(
        _bar(
            f"{model} binary, {many} connections: ≥ 0.6 x the ceiling",
            0.6,
            (model, BINARY, many),
            (model, BINARY, many),
            CEILING,
        )
        for model in ("image", "frames", "mask")
        for many in (16, 64)
    ),
    _bar("tiny gRPC, 64 connections: ≥ 0.7 x our JSON", 0.7, ("tiny", GRPC, 64), _TINY_64, QINFER),
    *(
        _bar(
            f"steps with implicit state, {_NAMES[encoding]}, 128 callers: ≥ 0.5 x plain requests",
            0.5,
            ("implicit", encoding, 128),
            ("plain", encoding, 128),
            QINFER,
        )
        for encoding in (JSON, GRPC)
    ),
    *(
        _faster_than_triton(
            f"steps with explicit state, {strategy}, {_NAMES[encoding]}, 64 callers", 1.0, model, encoding, 64
        )
        for model, strategy in (("explicit", "oldest"), ("direct", "direct"))
        for encoding in (JSON, GRPC)
    ),
    _faster_than_triton("streams of 100 responses of a model.py, 64 callers", 1.5, "stream", GRPC, 64),
    *(
        bar
        for encoding in (JSON, GRPC)
        for bar in (
            _faster_than_triton(
                f"ensemble of three networks, {_NAMES[encoding]}, 64 callers", 1.2, "chain", encoding, 64
            ),
            _bar(
                f"hits of the response cache, {_NAMES[encoding]}, 64 callers: ≥ 1.5 x without",
                1.5,
                ("cached", encoding, 64),
                ("single", encoding, 64),
                QINFER,
            ),
        )
    ),
    *(
        _bar(
            f"{what}, {_NAMES[encoding]}, 64 callers: ≥ {factor:g} x without",
            factor,
            (model, encoding, 64),
            ("open", encoding, 64),
            QINFER,
        )
        for model, what, factor in (("bounded", "a bounded queue", 0.9), ("split", "two weighted targets", 0.98))
        for encoding in (JSON, GRPC)
    ),
)


def _p50_ms(row: Row) -> float:
    return row.p50_us / 1000


def _gateway_us(row: Row) -> float:
    return row.cpu_us.get("gateway", 0.0)


def _latency_at_one(against: str, factor: float, ours: str, theirs: Setting) -> CostBar:
    return CostBar(
        bar=f"tiny {_NAMES[ours]}, 1 connection: p50 ≤ {factor:g} x {against}",
        ours=_setting(QINFER, "tiny", ours, 1),
        against=theirs,
        factor=factor,
        figure=_p50_ms,
        unit="ms",
    )


def _cost_of_ids(factor: float, plain: str, proxied: str) -> CostBar:
    return CostBar(
        bar=f"tiny {_NAMES[plain]} as behind a proxy: gateway CPU ≤ {factor:g} x that of equal requests",
        ours=_setting(QINFER, "tiny", proxied, 64),
        against=_setting(QINFER, "tiny", plain, 64),
        factor=factor,
        figure=_gateway_us,
        unit="µs",
    )


COST_BARS = (
    _latency_at_one("FastAPI direct", 2.5, JSON, _setting(FASTAPI, "tiny", JSON, 1)),
    _latency_at_one("FastAPI direct with orjson", 2.5, JSON, _setting(FASTAPI_ORJSON, "tiny", JSON, 1)),
    _latency_at_one("our JSON", 1.3, GRPC, _setting(QINFER, "tiny", JSON, 1)),
    *(
        CostBar(
            bar=f"{model} binary, 1 connection: p50 ≤ 0.9 x Triton",
            ours=_setting(QINFER, model, BINARY, 1),
            against=_setting(TRITON, model, BINARY, 1),
            factor=0.9,
            figure=_p50_ms,
            unit="ms",
        )
        for model in _LARGE
    ),
    _cost_of_ids(1.3, JSON, JSON_PROXIED),
    _cost_of_ids(1.4, GRPC, GRPC_PROXIED),
)


def _tails(rows: Rows) -> list[Verdict]:
    """The tail bar, for every model and encoding of qinfer at 64 connections."""
    verdicts = []
    for setting, row in rows.items():
        if setting.server != QINFER or setting.connections != 64 or setting.fresh or setting.model not in MODELS:
            continue
        bar = f"{setting.model} {setting.encoding}, 64 connections: p99 ≤ 4 x p50"
        if not row.valid:
            verdicts.append(_invalid(bar, row))
            continue
        ratio = row.p99_us / row.p50_us
        figures = f"{row.p99_us / 1000:.2f} ms against {row.p50_us / 1000:.2f} ms = {ratio:.2f} x"
        verdicts.append(Verdict(bar=bar, outcome=_outcome(passed=ratio <= 4.0), figures=figures))
    return verdicts


def _outcome(*, passed: bool) -> Outcome:
    return Outcome.PASS if passed else Outcome.MISS


def _invalid(bar: str, *rows: Row) -> Verdict:
    figures = ", ".join(
        f"{row.setting.server} had {row.errors} failed requests"
        if row.errors
        else f"{row.setting.server} answered none"
        for row in rows
        if not row.valid
    )
    return Verdict(bar=bar, outcome=Outcome.MISS, figures=figures)

"""The bars that the measurements must clear, and the verdict on each: pure, and never kinder than the figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.results import BATCH, IN_PROCESS, Row, Setting

QINFER = "qinfer"
FASTAPI, FASTAPI_ORJSON = "fastapi_direct", "fastapi_orjson"
MOSEC, MOSEC_ORJSON = "mosec", "mosec_orjson"
"""A peer as it is documented, and with its JSON replaced: the bars are judged against both."""

Rows = Mapping[Setting, Row]


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
        """Compares the medians; an invalid row is a miss, a missing one is not measured."""
        ours, theirs = rows.get(self.ours), [rows[setting] for setting in self.against if setting in rows]
        if ours is None or not theirs:
            return Verdict(bar=self.bar, outcome=Outcome.UNKNOWN, figures="")
        best = max(theirs, key=lambda row: row.rate)
        if not (ours.valid and best.valid):
            return _invalid(self.bar, ours, best)
        ratio = ours.rate / best.rate if best.rate else float("inf")
        figures = f"{ours.rate:,.0f}/s against {best.rate:,.0f}/s = {ratio:.2f} x"
        return Verdict(bar=self.bar, outcome=_outcome(passed=ratio >= self.factor), figures=figures)


def judge(rows: Rows) -> list[Verdict]:
    """Judges every bar: rates, latency of a lone caller, tails."""
    latencies = (_latency_at_one(rows, FASTAPI), _latency_at_one(rows, FASTAPI_ORJSON))
    return [*(bar.judge(rows) for bar in RATE_BARS), *latencies, *_tails(rows)]


def _setting(server: str, model: str, encoding: str, connections: int) -> Setting:
    return Setting(model=model, encoding=encoding, connections=connections, server=server)


def _bar(bar: str, factor: float, ours: tuple[str, str, int], against: tuple[str, str, int], server: str) -> RateBar:
    return RateBar(bar=bar, ours=_setting(QINFER, *ours), against=(_setting(server, *against),), factor=factor)


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
)


def _latency_at_one(rows: Rows, server: str) -> Verdict:
    bar = f"tiny JSON, 1 connection: p50 ≤ 2.5 x FastAPI direct{' with orjson' if server == FASTAPI_ORJSON else ''}"
    ours, theirs = rows.get(_setting(QINFER, "tiny", "json", 1)), rows.get(_setting(server, "tiny", "json", 1))
    if ours is None or theirs is None:
        return Verdict(bar=bar, outcome=Outcome.UNKNOWN, figures="")
    if not (ours.valid and theirs.valid):
        return _invalid(bar, ours, theirs)
    ratio = ours.p50_us / theirs.p50_us
    figures = f"{ours.p50_us / 1000:.2f} ms against {theirs.p50_us / 1000:.2f} ms = {ratio:.2f} x"
    return Verdict(bar=bar, outcome=_outcome(passed=ratio <= 2.5), figures=figures)


def _tails(rows: Rows) -> list[Verdict]:
    """The tail bar, for every model and encoding of qinfer at 64 connections."""
    verdicts = []
    for setting, row in rows.items():
        if setting.server != QINFER or setting.connections != 64:
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
    figures = ", ".join(f"{row.setting.server} had {row.errors} failed requests" for row in rows if not row.valid)
    return Verdict(bar=bar, outcome=Outcome.MISS, figures=figures)

"""Things that need attention now, by rules over the state that the gateway knows. Pure.

The alerts of Prometheus are more, and look back further; these need no Prometheus.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

from qinfer.models.readiness import ModelStatus
from qinfer.models.state import WorkerRecord
from qinfer.scaling.work import VersionWork
from qinfer_api.console.history import SeriesCounts

CRITICAL, WARNING = "critical", "warning"
OLD_S = 60.0
"""The age of a waiting request that needs attention."""
MUCH_FAILS, LEAST_FAILURES = 0.05, 3
"""The share of failed requests, and their least number, in the last slot."""


class Attention(NamedTuple):
    """A thing that needs attention: its level, the text, and the page that shows it."""

    level: str
    text: str
    page: str


def findings(
    statuses: Iterable[ModelStatus],
    workers: Sequence[WorkerRecord],
    work: Sequence[VersionWork],
    counts: Mapping[str, SeriesCounts],
    letters: Mapping[str, int],
) -> list[Attention]:
    """Returns the findings, critical ones first."""
    found = [*_of_workers(workers), *_of_models(statuses), *_of_work(work), *_of_counts(counts), *_of_letters(letters)]
    return sorted(found, key=lambda one: one.level != CRITICAL)


def _of_workers(workers: Sequence[WorkerRecord]) -> Iterator[Attention]:
    if not workers:
        yield Attention(CRITICAL, "No worker is alive: requests wait until one starts.", "workers")
    for worker in workers:
        for one in worker.late:
            yield Attention(WARNING, f"{one.text} on {worker.id}", "workers")


def _of_models(statuses: Iterable[ModelStatus]) -> Iterator[Attention]:
    for status in statuses:
        page = f"models/{quote(status.model, safe='')}"
        if status.error:
            yield Attention(CRITICAL, f"Model {status.model} can't be loaded: {status.error}", page)
        for version in status.failed:
            reason = status.versions[version].reason if version in status.versions else ""
            yield Attention(CRITICAL, f"Version {version} of {status.model} failed to load: {reason}", page)


def _of_work(work: Sequence[VersionWork]) -> Iterator[Attention]:
    for one in work:
        name = f"{one.model}:{one.version}"
        if one.requests and not one.workers:
            yield Attention(CRITICAL, f"{one.requests} requests wait for {name}, which no worker has ready.", "queues")
        elif one.oldest_age_s > OLD_S:
            yield Attention(WARNING, f"The oldest request for {name} has waited {one.oldest_age_s:.0f} s.", "queues")


def _of_counts(counts: Mapping[str, SeriesCounts]) -> Iterator[Attention]:
    for series, made in counts.items():
        total = sum(made.answered) + made.failed
        if series and made.failed >= LEAST_FAILURES and made.failed > MUCH_FAILS * total:
            model = series.rpartition(":")[0]
            text = f"{made.failed} of {total} requests for {series} failed in the last seconds."
            yield Attention(WARNING, text, f"models/{quote(model, safe='')}" if model else "models")


def _of_letters(letters: Mapping[str, int]) -> Iterator[Attention]:
    total, models = sum(letters.values()), sum(1 for count in letters.values() if count)
    if total:
        what = "1 dead letter is" if total == 1 else f"{total} dead letters are"
        yield Attention(WARNING, f"{what} kept, of {models} model{'s' if models > 1 else ''}.", "letters")

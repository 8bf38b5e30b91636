"""PromQL as tests look at it: which metrics an expression names, and how it uses them."""

import re
from typing import NamedTuple

from qinfer.observe import catalogue
from qinfer.observe.catalogue import Info

METRICS = {info.name: info for info in catalogue.ALL}
OF_BRIDGES = {info.name for info in catalogue.OF_BRIDGES}
OWN_OF_PROMETHEUS = {"up", "ALERTS"}

_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?(\[)?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|group_left|without|ignoring)\s*\([^)]*\)")
_FAMILY = re.compile(r"_(bucket|sum|count)$")


class Use(NamedTuple):
    """One selector of an expression.

    Attributes:
        name: The series' name, as it stands there.
        matchers: The label and the value of each matcher.
        over_time: It has a range, such as `[5m]`.
    """

    name: str
    matchers: tuple[tuple[str, str], ...]
    over_time: bool


def uses_of(expression: str) -> list[Use]:
    """Returns the selectors of series that are qinfer's, Triton's, Prometheus' own, or recorded by a rule."""
    found = []
    for name, matchers, over_time in _SELECTOR.findall(_GROUPING.sub(" ", expression)):
        if name in OWN_OF_PROMETHEUS or ":" in name or name.startswith(("qinfer_", "nv_")):
            found.append(Use(name, tuple(_MATCHER.findall(matchers)), bool(over_time)))
    return found


def metric_of(name: str) -> Info | None:
    """Returns the metric that a series is of: histograms have three series."""
    family = _FAMILY.sub("", name)
    if family in METRICS and METRICS[family].kind in ("histogram", "summary"):
        return METRICS[family]
    return METRICS.get(name)


def wrong_with(use: Use, recorded: set[str]) -> str:
    """Says what is wrong with a selector; empty if nothing is."""
    if ":" in use.name:
        return "" if use.name in recorded else f"{use.name} is recorded by no rule"
    if use.name in OWN_OF_PROMETHEUS:
        return ""
    info = metric_of(use.name)
    if info is None:
        return f"{use.name} is no metric"
    labels = {*info.labels, "le"} if use.name.endswith("_bucket") else {*info.labels}
    of_all = {("process", "")} if use.name in OF_BRIDGES else set()  # else it has what bridges show themselves, too
    unknown = {label for label, _ in {*use.matchers} - of_all} - labels
    if not of_all <= {*use.matchers}:
        unknown.add("process, which must be empty")
    if unknown:
        return f"{use.name} has no label {', '.join(sorted(unknown))}"
    if use.over_time == (info.kind == "gauge"):
        return f"{use.name} is a {info.kind}: {'no rate' if info.kind == 'gauge' else 'only its rate tells something'}"
    return ""

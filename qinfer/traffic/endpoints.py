"""Endpoints: names that callers use like a model's, and the targets that share their requests.

    name: digit-reader
    sticky: header:x-user-id
    targets:
      - {model: digits, version: 3, role: stable}
      - {model: digits, version: 4, weight: 0.1, when: [{tenant: testers}]}

The stable target answers the requests that no other target gets: here those of nine in ten users, except testers. One
file, YAML, TOML or JSON, declares one endpoint.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
from msgspec.structs import replace

from qinfer.core.documents import Unreadable, parse, read_limited
from qinfer.core.messages import Scalar
from qinfer.errors import InvalidRequest, SettingsError
from qinfer.models.repository.open import is_model_name
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.traffic.differences import Rule

LATEST = "latest"
"""The newest READY version of a canary's model."""

MAX_TARGETS = 16
MAX_NAME = 128

_MAX_CONDITIONS = 64
_DIGITS = 9  # sums of decimal fractions are not exact
_MAX_SHOWN = 60
_STICKY_WORDS = ("header", "parameter")
_TENANT = "tenant"


class Role(StrEnum):
    """The part that a target has.

    - stable: it answers requests that no other target gets, and stands for the endpoint in metadata, readiness and
      statistics.
    - canary: it answers a share of the requests, as versions on trial and the arms of an A/B test do.
    - shadow: it executes a share of the requests once more, and never answers a request.
    """

    STABLE = "stable"
    CANARY = "canary"
    SHADOW = "shadow"


class Condition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A condition on a request; all of its parts must hold.

    Attributes:
        tenant: The tenant of the request.
        headers: Headers of HTTP, or metadata of gRPC, and their values; names are case-insensitive.
        parameters: Parameters of the request, and their values.
    """

    tenant: str = ""
    headers: Mapping[str, str] = {}
    parameters: Mapping[str, Scalar] = {}


class Target(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A model version that gets requests of an endpoint.

    Attributes:
        model: The model, never an endpoint.
        version: The version of the model; `latest`, of a canary only, is the newest version that is READY.
        role: The part of the target; exactly one target is stable.
        weight: The share of the requests, from 0 to 1. The stable target gets all other requests, and needs no weight.
        when: A canary also gets every request that meets one of these conditions, regardless of its weight.
        trial: The version that is on trial, where the endpoint plans its canaries, else 0. The server sets it.
    """

    model: str
    version: int | Literal["latest"]
    role: Role = Role.CANARY
    weight: float | None = None
    when: tuple[Condition, ...] = ()
    trial: int = 0

    @property
    def label(self) -> str:
        """The target as `digits:4`."""
        return f"{self.model}:{self.version}"

    @property
    def place(self) -> tuple[str, int]:
        """Model and version; 0 = the latest."""
        return self.model, self.number

    @property
    def number(self) -> int:
        """The version; 0 = the latest."""
        return self.version if isinstance(self.version, int) else self.trial


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a canary.

    Attributes:
        weight: The share of requests that the canary answers, from 0 to less than 1.
        shadow: The share of requests that the canary executes beside stable, which answers them.
        least_s: The least time of the step, in seconds.
        least_requests: The least number of the canary's requests.
    """

    weight: float = 0.0
    shadow: float = 0.0
    least_s: float = 60.0
    least_requests: int = 100


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A comparison of the canary's share of bad requests.

    Attributes:
        of: The bad requests: those with `errors`; those with an `execution` time, or a `latency` for the caller, above
            stable's quantile; those with `disagreements`.
        quantile: The quantile of `execution` and `latency`, such as 0.5 or 0.99.
        tolerated: The odds ratio up to which the canary may be worse than stable; 1 = not worse.
        allowed: A share to compare with instead of the share of stable; `disagreements` need one.
    """

    of: Literal["errors", "execution", "latency", "disagreements"]
    quantile: float = 0.0
    tolerated: float = 1.0
    allowed: float | None = None

    @property
    def name(self) -> str:
        """The check's name, such as `errors` or `execution p99`."""
        return f"{self.of} p{self.quantile * 100:g}" if self.quantile else self.of


CHECKS = (
    Check(of="errors"),
    Check(of="execution", quantile=0.5),
    Check(of="execution", quantile=0.99),
    Check(of="latency", quantile=0.99),
    Check(of="disagreements", allowed=0.01),
)


class CanaryPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The declared steps and checks of an endpoint's canaries.

    Attributes:
        steps: The steps in order; promotion follows the last.
        checks: The checks.
        false_rollbacks: The highest rate of rollbacks among canaries as good as stable.
        no_data_s: Seconds without requests of a target after which the canary is paused.
        most_errors: The highest share of failed requests with which the canary leaves a step by itself, however many of
            stable's fail; 1 = all may fail.
    """

    steps: tuple[Step, ...]
    checks: tuple[Check, ...] = CHECKS
    false_rollbacks: float = 0.01
    no_data_s: float = 600.0
    most_errors: float = 0.1

    @property
    def decides(self) -> float:
        """The evidence that decides a check."""
        return len(self.checks) / self.false_rollbacks


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A name for several targets.

    Attributes:
        name: The name that callers use.
        targets: The targets.
        sticky: The key whose requests keep their target: `tenant`, `header:<name>` or `parameter:<name>`; empty = each
            request is drawn by itself. A sequence always keeps its target.
        hides_model: Requests for a model of the same name go to the endpoint instead.
        canary: The steps and checks by which the canary is promoted or rolled back; `None` = people decide.
        webhook: The URL that receives each event of the endpoint's canaries; empty = no URL.
        compare: Output → the rule by which a row of a shadow agrees with the stable target's row; the datatype decides
            for other outputs.
        revision: The number of the endpoint's last change, over all endpoints; in a declaration, the revision that it
            replaces: 0 = any.
        file: The digest of the file that declares the endpoint; empty = no file.

    Example:
        {"name": "digit-reader", "targets": [{"model": "digits", "version": 3, "role": "stable"},
         {"model": "digits", "version": 4, "weight": 0.1}], "revision": 7}
    """

    name: str = ""
    targets: tuple[Target, ...]
    sticky: str = ""
    hides_model: bool = False
    canary: CanaryPlan | None = None
    webhook: str = ""
    compare: Mapping[str, Rule] = {}
    revision: int = 0
    file: str = ""

    @property
    def stable(self) -> Target:
        """The target that stands for the endpoint."""
        return next(target for target in self.targets if target.role is Role.STABLE)

    @property
    def tried(self) -> Target | None:
        """The canary that a plan tries."""
        return next((target for target in self.targets if target.role is Role.CANARY), None)

    @property
    def answering(self) -> tuple[Target, ...]:
        """The targets that may answer: no shadow, and a planned canary only during its trial."""
        return tuple(
            target
            for target in self.targets
            if target.role is Role.STABLE or (target.role is Role.CANARY and (self.canary is None or target.trial))
        )

    def at_rest(self) -> "Endpoint":
        """Returns the endpoint without a trial."""
        kept = [target for target in self.targets if not (target.role is Role.SHADOW and target.trial)]
        planned = {} if self.canary is None else {"weight": None}
        rested = (replace(target, trial=0, **planned) if target.trial else target for target in kept)
        return replace(self, targets=tuple(rested))

    def weight_of(self, target: Target) -> float:
        """Returns a target's share of the requests."""
        if target.role is not Role.STABLE:
            return target.weight or 0.0
        return round(1.0 - sum(each.weight or 0.0 for each in self.targets if each.role is Role.CANARY), _DIGITS)


def read_sticky(text: str) -> tuple[str, str]:
    """Parses `sticky` into its kind and a name."""
    if text in ("", _TENANT):
        return text, ""
    kind, _, name = text.partition(":")
    if kind not in _STICKY_WORDS or not name.strip():
        raise ValueError(f"sticky '{text[:60]}' is not known; write tenant, header:<name> or parameter:<name>")
    return kind, name.strip().lower() if kind == "header" else name.strip()


def read_endpoint(document: Any, name: str = "") -> Endpoint:
    """Reads and checks a declaration with its `name`, or raises `InvalidRequest`."""
    try:
        endpoint = msgspec.convert(document, Endpoint)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"this is no declaration of an endpoint: {_explained(error, document)}") from None
    for where, part, kind in _parts(document):
        if unknown := set(part) - set(kind.__struct_fields__):
            known = ", ".join(name for name in kind.__struct_fields__ if name not in _SET_BY_SERVER)
            raise InvalidRequest(f"{where} of an endpoint has no '{min(unknown, key=str)[:60]}'; it has {known}")
    if name and endpoint.name not in ("", name):
        raise InvalidRequest(
            f"the declaration names '{endpoint.name[:MAX_NAME]}', but it is for '{name}'; leave the name out"
        )
    endpoint = replace(endpoint, name=endpoint.name or name).at_rest()
    check(endpoint)
    return endpoint


_SET_BY_SERVER = ("trial", "file")

_WORDS: Mapping[str, tuple[str, ...]] = {
    "role": tuple(Role),
    "version": ("a number", LATEST),
    "of": get_args(get_type_hints(Check)["of"]),
    "agree": get_args(get_type_hints(Rule)["agree"]),
    "nan": get_args(get_type_hints(Rule)["nan"]),
}


def _explained(error: msgspec.ValidationError, document: Any) -> str:
    what, _, place = str(error).partition(" - at `$")
    place = place.strip(".`")
    if not place:
        return what
    words = _WORDS.get(place.rpartition(".")[2], ())
    wanted = f"it may be {' or '.join(filter(None, words))}" if words else ""
    said = what[0].lower() + what[1:]
    try:
        value = _value_at(document, place)
    except (KeyError, IndexError, TypeError, ValueError):
        return f"`{place}`: {said}" + (f"; {wanted}" if wanted else "")
    return f"`{place}` is '{str(value)[:_MAX_SHOWN]}'; {wanted or said}"


def _value_at(document: Any, place: str) -> Any:
    for step in re.findall(r"\w+|\.{3}", place):
        document = document[int(step) if isinstance(document, list) else step]
    return document


def _parts(document: Any) -> Iterator[tuple[str, Mapping[str, Any], Any]]:
    """Yields objects with their types: unlike stored objects, they may have no unknown fields."""
    yield "the declaration", document, Endpoint
    for target in document["targets"]:
        yield "a target", target, Target
        for condition in target.get("when", ()):
            yield "a condition", condition, Condition
    if plan := document.get("canary"):
        yield "the canary's plan", plan, CanaryPlan
        for step in plan["steps"]:
            yield "a step", step, Step
        for one in plan.get("checks", ()):
            yield "a check", one, Check
    for rule in document.get("compare", {}).values():
        yield "a rule of `compare`", rule, Rule


def check(endpoint: Endpoint) -> None:
    """Raises `InvalidRequest` for a declaration that is wrong for any models."""
    problems = [*_problems(endpoint)]
    if problems:
        raise InvalidRequest(f"endpoint '{endpoint.name[:MAX_NAME]}': {'; '.join(problems)}")


def _problems(endpoint: Endpoint) -> Iterator[str]:
    name, targets = endpoint.name, endpoint.targets
    if not is_model_name(name) or len(name) > MAX_NAME:
        yield f"its name must have the form of a model's name, and at most {MAX_NAME} characters"
    stable = [target for target in targets if target.role is Role.STABLE]
    if len(stable) != 1:
        yield f"one target must have the role stable, not {len(stable)}"
    if len(targets) > MAX_TARGETS:
        yield f"it has {len(targets)} targets; {MAX_TARGETS} are possible"
    labels = [target.label for target in targets if target.role is not Role.SHADOW]
    if len(set(labels)) < len(labels):
        yield "a target appears twice; add up the weights"
    for target in targets:
        yield from _problems_of(target)
    if len(stable) == 1:
        yield from _problems_of_weights(endpoint, stable[0])
    if endpoint.canary is not None and len(stable) == 1:
        yield from _problems_of_plan(endpoint, endpoint.canary)
    try:
        read_sticky(endpoint.sticky)
    except ValueError as error:
        yield str(error)


def _problems_of_plan(endpoint: Endpoint, plan: CanaryPlan) -> Iterator[str]:
    canaries = [target for target in endpoint.targets if target.role is Role.CANARY]
    if len(canaries) > 1:
        yield f"the plan is for one canary, not {len(canaries)}; keep one, or leave out `canary`"
    stable = endpoint.stable.model
    for target in canaries:
        if target.version == LATEST and target.model != stable:
            yield f"target '{target.label}': a plan follows the latest version of '{stable}' only; write a number"
    for target in endpoint.targets:
        if target.role is not Role.SHADOW and target.weight is not None and not target.trial:
            yield f"target '{target.label}': the steps of the plan set its weight; leave the weight out"
    try:
        checked(plan)
    except InvalidRequest as error:
        yield error.message


def checked(plan: CanaryPlan) -> CanaryPlan:
    """Returns a plan, or raises `InvalidRequest`."""
    if not plan.steps:
        raise InvalidRequest("a canary has no steps; give it at least one, such as weight 0.05")
    for number, step in enumerate(plan.steps, 1):
        if not (0 <= step.weight < 1 and 0 <= step.shadow <= 1 and step.weight + step.shadow > 0):
            raise InvalidRequest(
                f"step {number} has weight {step.weight:g} and shadow {step.shadow:g}; make weight a share from 0 to "
                "less than 1, shadow one from 0 to 1, and one of them more than 0"
            )
        if not (0 <= step.least_s < math.inf and step.least_requests >= 1):
            raise InvalidRequest(
                f"step {number} lasts {step.least_s:g} s and {step.least_requests} requests at least; make the time 0 "
                "or more, and the requests 1 or more"
            )
    for check in plan.checks:
        _check_numbers(check)
    names = [check.name for check in plan.checks]
    if "errors" not in names or len(set(names)) < len(names):
        raise InvalidRequest(f"the checks are {', '.join(names) or 'none'}; name each once, and errors among them")
    if not 0 < plan.most_errors <= 1:
        raise InvalidRequest(f"most_errors is {plan.most_errors:g}; make it a share above 0, up to 1 for any")
    if not (0 < plan.false_rollbacks < 1 and plan.no_data_s > 0):
        raise InvalidRequest(
            f"false_rollbacks is {plan.false_rollbacks:g} and no_data_s {plan.no_data_s:g}; make the first a share "
            "between 0 and 1, and the second more than 0"
        )
    return plan


def _check_numbers(check: Check) -> None:
    is_latency = check.of in ("execution", "latency")
    if is_latency != (0 < check.quantile < 1):
        raise InvalidRequest(
            f"the check of {check.of} has the quantile {check.quantile:g}; "
            + ("make it one between 0 and 1, such as 0.99" if is_latency else "leave it out")
        )
    if not 1 <= check.tolerated <= 100:
        raise InvalidRequest(
            f"the check '{check.name}' tolerates {check.tolerated:g}; make it an odds ratio from 1 to 100"
        )
    if check.of == "disagreements" and check.allowed is None:
        raise InvalidRequest("the check of disagreements allows no share; say how many are allowed, such as 0.01")
    if check.allowed is not None and (is_latency or not 0 <= check.allowed < 1):
        raise InvalidRequest(
            f"the check '{check.name}' allows {check.allowed:g}; "
            + ("leave it out, the quantile says it" if is_latency else "make it a share from 0 to less than 1")
        )


def _problems_of(target: Target) -> Iterator[str]:
    label = target.label[:MAX_NAME]
    if not is_model_name(target.model):
        yield f"'{target.model[:MAX_NAME]}' can't be the name of a model"
    if target.version == LATEST and target.role is not Role.CANARY:
        yield f"target '{label}': only a canary may be the latest version; write the number of the version"
    if target.version != LATEST and not 0 < target.number < 2**63:
        yield f"target '{label}': a version is a number above 0, or latest"
    if target.weight is not None and not 0 <= target.weight <= 1:
        yield f"target '{label}': weight {target.weight:g} is not a share from 0 to 1, such as 0.1"
    if target.when and target.role is not Role.CANARY:
        yield f"target '{label}': only a canary may have `when`"
    if len(target.when) > _MAX_CONDITIONS or Condition() in target.when:
        yield f"target '{label}': `when` takes 1 to {_MAX_CONDITIONS} conditions, each of tenant, headers or parameters"


def _problems_of_weights(endpoint: Endpoint, stable: Target) -> Iterator[str]:
    rest = endpoint.weight_of(stable)
    if rest < 0:
        yield f"the weights of the canaries add up to {1 - rest:g}; make it at most 1"
    elif stable.weight is not None and round(stable.weight, _DIGITS) != rest:
        yield f"the stable target gets the rest, {rest:g}, not {stable.weight:g}; leave its weight out"


def misfit(stable: ModelSpec, other: ModelSpec) -> str:
    """Returns why requests for one model can't go to another.

    Both models need the same inputs and outputs; both or neither have a batch dimension, and both or neither are
    decoupled. A sequence stays within one model.
    """
    if stable.name == other.name:
        return ""
    if stable.is_stateful or other.is_stateful:
        return "a model with sequences can be mixed with its own versions only"
    if stable.decoupled != other.decoupled:
        return "one gives a single response, the other a stream"
    if (stable.max_batch_size > 0) != (other.max_batch_size > 0):
        return "one has a batch dimension, the other none"
    for kind, ours, theirs in (("input", stable.inputs, other.inputs), ("output", stable.outputs, other.outputs)):
        mine, its = {_shape(one) for one in ours}, {_shape(one) for one in theirs}
        if mine != its:
            only = ", ".join(sorted({name for name, *_ in mine ^ its}))
            return f"they differ in {kind} {only}; all targets need the same inputs and outputs"
    return ""


def why_no_shadow(spec: ModelSpec) -> str:
    """Returns why a model can't be a shadow."""
    if spec.sequences is not None:
        return "a model with sequences can't be a shadow: a share of its requests has no meaning"
    if spec.decoupled:
        return "a decoupled model can't be a shadow: its streams of responses can't be compared"
    if spec.steps:
        return "an ensemble can't be a shadow: its steps would go before online requests; shadow the model of a step"
    return ""


def wrong_rules(endpoint: Endpoint, stable: ModelSpec) -> Iterator[str]:
    """Yields the mistakes in comparison rules."""
    outputs = {output.name: output for output in stable.outputs}
    for name, rule in endpoint.compare.items():
        if name not in outputs:
            yield f"compare: '{stable.name}' has no output '{name[:MAX_NAME]}'; it has {', '.join(outputs)}"
        elif outputs[name].datatype == "BYTES" and rule.agree in ("argmax", "within"):
            yield f"compare: output '{name}' has texts, which can't be compared by '{rule.agree}'; say 'equal'"


def _shape(tensor: TensorSpec) -> tuple[str, str, tuple[int, ...], bool]:
    return tensor.name, tensor.datatype, tensor.dims, tensor.optional


_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_MAX_BYTES = 2**20
_DIGEST_DIGITS = 16


def read_directory(directory: str | Path) -> list[Endpoint]:
    """Reads a directory's declarations by name, or raises `SettingsError`."""
    try:
        paths = sorted(path for path in Path(directory).iterdir() if path.suffix in _SUFFIXES)
    except OSError as error:
        raise SettingsError(f"the directory of endpoints '{directory}' can't be read: {error.strerror}") from None
    found: dict[str, Path] = {}
    endpoints = []
    for path in paths:
        endpoint = read_file(path)
        if endpoint.name in found:
            both = f"'{found[endpoint.name].name}' and '{path.name}'"
            raise SettingsError(f"{both} declare the endpoint '{endpoint.name}'; keep one of them")
        found[endpoint.name] = path
        endpoints.append(endpoint)
    return endpoints


def read_file(path: Path) -> Endpoint:
    """Reads a file, and adds the digest of its content."""
    try:
        document: Any = parse(read_limited(path, _MAX_BYTES), path.suffix, is_typed=True)
        named = {"name": path.stem, **document} if isinstance(document, dict) else document
        endpoint = read_endpoint(named)
    except OSError as error:
        raise SettingsError(f"the file '{path}' can't be read: {error.strerror}") from None
    except Unreadable as error:
        raise SettingsError(f"the file '{path}': {error}") from None
    except InvalidRequest as error:
        raise SettingsError(f"the file '{path}': {error.message}") from None
    digest = hashlib.sha256(msgspec.json.encode(endpoint)).hexdigest()
    return msgspec.structs.replace(endpoint, file=digest[:_DIGEST_DIGITS])

"""Canaries under load: the versions that are tried, callers who write down who answered what, and what may not happen.

Each version says in its second output which one it is, so a reply shows whether the version that it names has answered.
Callers behave as behind a load balancer: what a gateway did not take goes to the next one. Stored requests have an id,
and are sent once more to another gateway, mostly under other weights.
"""

import asyncio
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import httpx
from onnx import TensorProto, helper

from qinfer.testing import eventually
from tests.chaos.verdict import Verdict, expected
from tests.support import models

MODEL, PACED = "sums", "paced"

_AGAIN = {429, 503}
_CLIENT_TIMEOUT_S = 60.0
"""Far more than leases and restarts can take: who waits longer waits for something that was lost."""
_LAST_TRIES_S = 60.0
_CALLERS, _PAUSE_S = 10, 0.08
_SUBMITTERS, _SUBMIT_PAUSE_S = 3, 0.15
_REPEATED_WITHIN_S = 2.0
_MORE = 100
"""Requests after the end of a trial."""
_SHOWN = 20

ENDS = ("promoted", "rolled back")
"""States of a trial that has ended."""


class Version(IntEnum):
    """The versions of the model: `sum = a + b`, or not."""

    STABLE = 1
    GOOD = 2
    WRONG = 3
    """Answers one more than the sum, with the code of an answer."""
    FAILING = 4
    """Answers nothing but errors."""
    SLOWER = 5
    """Executes 30 % longer; of the model `PACED` only."""


_INPUTS: list[models.Port] = [(name, "FP32", (1,)) for name in "ab"]
_OUTPUTS: list[models.Port] = [(name, "FP32", (1,)) for name in ("sum", "version")]
_ALL = "version_policy: { all { } }\n"
_PACED = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({lasts_s})
        return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "ab")
        version = np.full_like(a, {version})
        return pb_utils.InferenceResponse([pb_utils.Tensor("sum", a + b), pb_utils.Tensor("version", version)])
"""

STEPS = (
    {"shadow": 0.5, "least_s": 1, "least_requests": 30},
    {"weight": 0.2, "least_s": 1, "least_requests": 30},
    {"weight": 0.5, "least_s": 1, "least_requests": 60},
)
WITHOUT_SHADOW = STEPS[1:]
"""Steps for versions that are to be found while they answer callers."""


def write_models(repository: Path, name: str = MODEL, more: str = "") -> None:
    """Writes the versions that take no time; `more` is appended to their configuration."""
    for version in (Version.STABLE, Version.GOOD, Version.WRONG, Version.FAILING):
        models.write(repository, name, [*_nodes(version)], _INPUTS, _OUTPUTS, version=version)
    with (repository / name / "config.pbtxt").open("a") as config:
        config.write(_ALL + more)


def write_paced(repository: Path, execution_s: float) -> None:
    """Writes a model with the same tensors, whose executions take a while."""
    for version, lasts_s in ((Version.STABLE, execution_s), (Version.SLOWER, 1.3 * execution_s)):
        directory = repository / PACED / str(version.value)
        directory.mkdir(parents=True)
        (directory / "model.py").write_text(_PACED.format(lasts_s=lasts_s, version=float(version)))
    config = models.config(PACED, _INPUTS, _OUTPUTS, 4).replace('"onnxruntime"', '"python"')
    (repository / PACED / "config.pbtxt").write_text(config + _ALL)


def _nodes(version: Version) -> Iterator[Any]:
    added, missing = float(version is Version.WRONG), float(99 * (version is Version.FAILING))
    for name, value in (("zero", 0.0), ("added", added), ("number", float(version)), ("missing", missing)):
        yield helper.make_node("Constant", [], [name], value=helper.make_tensor(name, TensorProto.FLOAT, [1], [value]))
    yield helper.make_node("Mul", ["a", "zero"], ["nothing"])
    yield helper.make_node("Add", ["nothing", "number"], ["version"])
    yield helper.make_node("Add", ["nothing", "missing"], ["place"])
    yield helper.make_node("Cast", ["place"], ["index"], to=TensorProto.INT64)
    yield helper.make_node("Add", ["a", "b"], ["total"])
    yield helper.make_node("Add", ["total", "added"], ["right"])
    yield helper.make_node("GatherElements", ["right", "index"], ["sum"], axis=1)  # there is no place 99


@dataclass(slots=True, kw_only=True)
class Trial:
    """An endpoint with one version on trial, and what its callers saw."""

    name: str
    version: Version
    steps: Sequence[dict[str, float]] = STEPS
    model: str = MODEL
    state: str = ""
    """How it ended, or was on the way."""
    done_s: float = math.inf
    """When a caller was told that its rollback is done."""
    events: list[str] = field(default_factory=list)
    reason: str = ""
    """Why it ended."""
    tried: int = 0
    """The canary's requests, those of a shadow included, up to its end."""
    answered: Counter[int] = field(default_factory=Counter)
    """Replies by the version that they name, failures included."""

    @property
    def is_bad(self) -> bool:
        return self.version is not Version.GOOD

    @property
    def declaration(self) -> dict[str, Any]:
        """The declaration of the endpoint at which the version is tried."""
        stable = {"model": self.model, "version": int(Version.STABLE), "role": "stable"}
        compare = {"version": {"agree": "within", "tolerance": 100}}
        targets = [stable, {"model": self.model, "version": int(self.version)}]
        return {"targets": targets, "compare": compare, "canary": {"steps": list(self.steps)}}


@dataclass(slots=True, kw_only=True)
class Stored:
    """A stored request: its number is what it asks for."""

    trial: Trial
    number: int
    came_s: float
    links: list[str] = field(default_factory=list)
    """The request's path, as each gateway that it was sent to has told it."""
    outcomes: list[tuple[int, int, float | None]] = field(default_factory=list)
    """Status, version and sum, each time that its result was read."""


class CanaryCallers:
    """See the module docstring.

    Args:
        urls: Where the gateways are.
        seed: Decides when stored requests are sent again.

    Attributes:
        trial: The endpoint that is asked.
        stored: The stored requests.
        refusals: Why requests were not taken, with how often; each was sent again.
        problems: What may never happen.
        answers: How many requests were answered.
    """

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self.trial: Trial | None = None
        self.stored: list[Stored] = []
        self.refusals: Counter[str] = Counter()
        self.problems: list[str] = []
        self.answers = 0
        self._urls = itertools.cycle(urls)
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self._is_over = asyncio.Event()
        self._is_too_late = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(timeout=_CLIENT_TIMEOUT_S, limits=limits)

    async def run(self) -> None:
        """Asks until `stop`; what was begun is carried to its end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(self._ask_on())
            for _ in range(_SUBMITTERS):
                group.create_task(self._submit_on())

    def stop(self) -> None:
        """Lets no new request begin; what is still refused long after that is given up."""
        self._is_over.set()
        asyncio.get_running_loop().call_later(_LAST_TRIES_S, self._is_too_late.set)

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[httpx.Response, float]:
        """Sends a request to one gateway after the other; returns the reply of that which takes it, and the time."""
        loop = asyncio.get_running_loop()
        while True:
            sent_s = loop.time()
            try:
                reply = await self._http.request(method, next(self._urls) + path, json=body, headers=headers)
            except httpx.ReadTimeout:
                self.problems.append(f"{method} {path} was not answered within {_CLIENT_TIMEOUT_S} s")
            except httpx.TransportError as error:
                self.refusals[type(error).__name__] += 1
            else:
                if reply.status_code not in _AGAIN or "qinfer-request-state" in reply.headers:
                    return reply, sent_s
                reason = re.sub(r"[0-9.]+ s\b", "N s", reply.text.rpartition("] ")[2])[:60]
                self.refusals[f"{reply.status_code} {reason}"] += 1
            if self._is_too_late.is_set():
                return httpx.Response(599, text="given up"), sent_s
            await asyncio.sleep(0.1)

    async def declare(self, trial: Trial) -> None:
        """Declares an endpoint, whose trial then begins by itself."""
        reply, _ = await self.call("PUT", f"/v1/endpoints/{trial.name}", trial.declaration)
        assert reply.status_code == 200, reply.text

    async def look(self, trial: Trial) -> None:
        """Notes the state of a trial."""
        reply, _ = await self.call("GET", f"/v1/endpoints/{trial.name}")
        assert reply.status_code == 200, reply.text
        found = reply.json()
        trial.state = (found["canary"] or {}).get("state", "not begun")
        trial.events = [event["event"] for event in reversed(found["events"])]
        if trial.state == "rolled back":
            trial.done_s = min(trial.done_s, asyncio.get_running_loop().time())
        if trial.state in ENDS:
            trial.reason = found["canary"]["reason"]
            trial.tried = found["canary"]["checks"][0]["canary_requests"]

    async def follow(self, trial: Trial, within_s: float) -> None:
        """Asks the endpoint of a trial until that has ended, and then further, so that late answers would be seen."""
        self.trial = trial

        async def has_ended() -> bool:
            await asyncio.sleep(0.1)
            await self.look(trial)
            return trial.state in ENDS

        try:
            await eventually(has_ended, within_s, f"the end of {trial.name}")
        except TimeoutError as error:
            self.problems.append(f"{error}; it is {trial.state}")
            return
        wanted = trial.answered.total() + _MORE
        await eventually(lambda: trial.answered.total() >= wanted, within_s, f"requests after the end of {trial.name}")

    async def read_all(self) -> None:
        """Reads the result of every stored request twice."""
        stored = iter([one for one in self.stored for _ in range(2)])

        async def read() -> None:
            for one in stored:
                reply, _ = await self.call("GET", f"{one.links[0]}/result?wait=20")
                version, total = self._seen(one.trial, reply, one.number, one.came_s)
                one.outcomes.append((reply.status_code, version, total))

        async with asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(read())

    async def _ask_on(self) -> None:
        while not self._is_over.is_set():
            if (trial := self.trial) is not None:
                number = next(self._numbers)
                reply, sent_s = await self.call("POST", f"/v2/models/{trial.name}/infer", body_of(number))
                version, _ = self._seen(trial, reply, number, sent_s)
                trial.answered[version] += 1
                self.answers += 1
            await asyncio.sleep(_PAUSE_S * self._rng.uniform(0.5, 1.5))

    async def _submit_on(self) -> None:
        while not self._is_over.is_set():
            if (trial := self.trial) is not None:
                stored = Stored(trial=trial, number=next(self._numbers), came_s=asyncio.get_running_loop().time())
                self.stored.append(stored)
                await self._submit(stored)
                await asyncio.sleep(self._rng.uniform(0, _REPEATED_WITHIN_S))
                await self._submit(stored)
            await asyncio.sleep(_SUBMIT_PAUSE_S * self._rng.uniform(0.5, 1.5))

    async def _submit(self, stored: Stored) -> None:
        """Hands a request in, or once more; one that was accepted at the first time came then."""
        path, headers = (
            f"/v1/models/{stored.trial.name}/requests",
            {"request-id": f"{stored.trial.name}-{stored.number}"},
        )
        reply, _ = await self.call("POST", path, body_of(stored.number), **headers)
        if reply.status_code == 202:
            stored.links.append(reply.headers["location"])
        else:
            self.problems.append(f"{stored.number} was not accepted: {reply.status_code} {reply.text[:200]}")

    def _seen(self, trial: Trial, reply: httpx.Response, number: int, came_s: float) -> tuple[int, float | None]:
        """Judges a reply; returns the version that it names, and the sum."""
        unnamed = Version.FAILING if reply.status_code == 500 else 0  # a stored failure is read without its target
        version = int(reply.headers.get("qinfer-target", f"{MODEL}:{unnamed}").rpartition(":")[2])
        about = f"{number} of {trial.name} ({trial.version.name}), answered by version {version}"
        if came_s >= trial.done_s and version == trial.version:
            self.problems.append(f"{about}, came {came_s - trial.done_s:.3f} s after the end of the rollback")
        if reply.status_code != 200:
            if (reply.status_code, version, trial.version) != (500, Version.FAILING, Version.FAILING):
                self.problems.append(f"{about}: {reply.status_code} {reply.text[:200]}")
            return version, None
        body = reply.json()
        (total, by), named = (one["data"][0] for one in body["outputs"]), body["model_version"]
        right = expected(number) + (version == Version.WRONG)
        if (total, by, named) != (right, version, str(version)):
            self.problems.append(f"{about}, has {total} of version {by}, named {named}, and not {right}")
        return version, total


def body_of(number: int) -> dict[str, Any]:
    """Returns the request whose sum is 2n + 1."""
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [value]}
        for name, value in (("a", number), ("b", number + 1))
    ]
    return {"inputs": inputs, "outputs": [{"name": "sum"}, {"name": "version"}]}


def judge(trials: Sequence[Trial], callers: CanaryCallers, kills: int) -> Verdict:
    """Counts, and says what is wrong."""
    counts: Counter[str] = Counter()
    problems = [*callers.problems]
    for trial in trials:
        counts["rolled-back" if trial.state == "rolled back" else trial.state] += 1
        counts["answered"] += trial.answered.total()
        counts["by-bad"] += trial.answered[trial.version] * trial.is_bad
        problems += (f"{trial.name} ({trial.version.name}): {problem}" for problem in _problems(trial))
    for one in callers.stored:
        counts["stored"] += 1
        if len(set(one.links)) != 1:
            problems.append(f"request {one.number} of {one.trial.name} was accepted as {one.links}")
        elif len(set(one.outcomes)) != 1:
            counts["duplicates"] += 1
            problems.append(f"request {one.number} of {one.trial.name} was seen as {one.outcomes}")
    words = ("promoted", "rolled-back", "answered", "by-bad", "stored", "duplicates")
    line = f"canaries={len(trials)} " + " ".join(f"{word}={counts[word]}" for word in words)
    return Verdict(f"{line} kills={kills}", problems[:_SHOWN])


def _problems(trial: Trial) -> Iterator[str]:
    end = ["roll back", "rolled back everywhere"] if trial.is_bad else ["promote", "finish"]
    if trial.state != ("rolled back" if trial.is_bad else "promoted"):
        yield f"is {trial.state}"
    if (
        trial.events[-2:] != end
        or trial.events.count("begin") != 1
        or len({"finish", "roll back"} & {*trial.events}) > 1
    ):
        yield f"has the events {trial.events}"
    if trial.version is Version.WRONG and trial.answered[trial.version]:
        yield f"has answered {trial.answered[trial.version]}, and a shadow was to catch it"

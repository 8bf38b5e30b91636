"""Callers of stateful models, and what they saw: a step's answer is the sum of the numbers sent so far.

Each caller has one sequence at a time, whose numbered steps it sends one after the other to any of the gateways, until
each has an answer. One that is lost is followed by another. Every third caller may leave out the numbers, and then ends
its sequence at the first error.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from qinfer.client import AsyncClient, AsyncSequence
from qinfer.client.results import InferResult
from qinfer.errors import QinferError, SequenceLost
from tests.chaos.verdict import Verdict
from tests.support import models, python_models

IMPLICIT, EXPLICIT = "implicit", "explicit"

_PATIENCE_S = 90.0
"""Far more than leases and restarts can take: a step without an answer for so long hangs."""
HANGS = "no answer"
_LENGTHS = (5, 30)
_PAUSE_S = 0.05
_SHOWN = 20
_IDLE = "max_sequence_idle_microseconds: 120000000"


def write_models(repository: Path) -> tuple[str, str]:
    """Writes a model whose state is kept beside the queue, and one that keeps it in memory; returns their names."""
    models.accumulator(repository, IMPLICIT, strategy="oldest { max_candidate_sequences: 400 }", more=_IDLE)
    oldest = f"oldest {{ max_candidate_sequences: 400 }} {_IDLE}"
    python_models.write_accumulator(repository, EXPLICIT, oldest)
    return IMPLICIT, EXPLICIT


@dataclass(slots=True, kw_only=True)
class Told:
    """One sequence: its numbers, the answers that came, and why it ended early (empty = it is complete)."""

    model: str
    numbers: list[int]
    answers: list[float] = field(default_factory=list)
    is_numbered: bool = True
    trouble: str = ""
    is_lost: bool = False


class SequenceClients:
    """See the module docstring.

    Args:
        urls: Where the gateways serve HTTP.
        counts: Model → how many callers.
        seed: Decides what is sent.
        has_unnumbered: Whether some callers leave out the numbers of steps.

    Attributes:
        sequences: What was seen.
        repeats: How often a step was sent again by a caller, beside what the client repeats by itself.
    """

    def __init__(self, urls: Items[str], counts: dict[str, int], seed: int, *, has_unnumbered: bool = False) -> None:
        self._urls = urls
        self._has_unnumbered = has_unnumbered
        self._counts = counts
        self._rng = random.Random(seed)
        self._is_over = asyncio.Event()
        self.sequences: list[Told] = []
        self.repeats = 0

    async def run(self) -> None:
        """Asks until `stop`; sequences that have begun are carried to their end."""
        async with asyncio.TaskGroup() as group:
            for model, count in self._counts.items():
                for number in range(count):
                    group.create_task(self._ask_on(model, is_numbered=number % 3 > 0 or not self._has_unnumbered))

    def stop(self) -> None:
        self._is_over.set()

    async def _ask_on(self, model: str, *, is_numbered: bool) -> None:
        input_name, output_name = ("INPUT", "OUTPUT") if model == IMPLICIT else ("x", "y")
        while not self._is_over.is_set():
            numbers = [self._rng.randint(1, 100) for _ in range(self._rng.randint(*_LENGTHS))]
            told = Told(model=model, numbers=numbers, is_numbered=is_numbered)
            self.sequences.append(told)
            async with AsyncClient(self._rng.choice(self._urls), max_retries=3) as client:
                sequence = client.sequence(model) if is_numbered else _Unnumbered(client, model, self._rng)
                try:
                    for position, number in enumerate(numbers):
                        inputs = {input_name: np.array([[number]], "<f4")}
                        is_last = position == len(numbers) - 1
                        async with asyncio.timeout(_PATIENCE_S):
                            answer = await self._step(sequence, inputs, end=is_last)
                        told.answers.append(float(answer[output_name].ravel()[0]))
                        await asyncio.sleep(self._rng.random() * _PAUSE_S)
                except SequenceLost as error:
                    told.trouble, told.is_lost = f"{error.code}: {error.message}", True
                except QinferError as error:
                    told.trouble = f"{error.code}: {error.message}"
                    if isinstance(sequence, _Unnumbered):
                        await sequence.end({input_name: np.array([[0]], "<f4")})
                except TimeoutError:
                    told.trouble = f"{HANGS} within {_PATIENCE_S} s"

    async def _step(
        self, sequence: "AsyncSequence | _Unnumbered", inputs: dict[str, np.ndarray], *, end: bool
    ) -> InferResult:
        """Sends a step until it has an answer, or an error that ends the sequence."""
        while True:
            try:
                return await sequence.infer(inputs, end=end)
            except QinferError as error:
                if isinstance(error, SequenceLost | _StepFailed) or not error.retryable:
                    raise
                self.repeats += 1
                await asyncio.sleep(_PAUSE_S)


class _StepFailed(QinferError):
    """An error of a step without a number, which may be in effect."""


class _Unnumbered:
    """Steps without numbers."""

    def __init__(self, client: AsyncClient, model: str, rng: random.Random) -> None:
        self._client, self._model, self._id = client, model, rng.getrandbits(48) + 1
        self._has_begun = False

    async def infer(self, inputs: dict[str, np.ndarray], *, end: bool) -> InferResult:
        flags = {"sequence_id": self._id, "sequence_start": not self._has_begun, "sequence_end": end}
        self._has_begun = True
        try:
            return await self._client.infer(self._model, inputs, parameters=flags)
        except QinferError as error:
            raise _StepFailed(error.message) from error

    async def end(self, inputs: dict[str, np.ndarray]) -> None:
        """Ends the sequence by another life of a single step."""
        while True:
            self._has_begun = False
            with suppress(_StepFailed):
                await self.infer(inputs, end=True)
                return
            await asyncio.sleep(_PAUSE_S)


def judge(
    sequences: Items[Told], *, handed_over: int, kills: int, models: Items[str] = (IMPLICIT, EXPLICIT)
) -> Verdict:
    """Counts, and says what is wrong: no answer may be, only a state in memory may be lost, some of each model end."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for told in sequences:
        counts["sequences"] += 1
        counts["steps"] += len(told.answers)
        counts[f"complete-{told.model}"] += not told.trouble
        counts["restarted"] += told.is_lost
        counts["broken"] += bool(told.trouble and not told.is_numbered)
        sums = np.cumsum(told.numbers)[: len(told.answers)].tolist()
        counts["wrong"] += sum(answer != right for answer, right in zip(told.answers, sums, strict=True))
        is_broken = not told.is_numbered and not told.trouble.startswith(HANGS)
        is_fine = not told.trouble or is_broken or (told.is_lost and told.model == EXPLICIT)
        counts["lost"] += not is_fine
        if not is_fine or told.answers != sums:
            step = len(told.answers) + 1
            problems.append(
                f"{told.model}: {told.answers} of {sums}; step {step} of {len(told.numbers)}: {told.trouble}"
            )
    problems += [f"no sequence of {model} is complete" for model in models if not counts[f"complete-{model}"]]
    words = ("sequences", "steps", "restarted", "broken", "lost", "wrong")
    line = " ".join(f"{word}={counts[word]}" for word in words)
    return Verdict(f"{line} resumed={handed_over} kills={kills}", problems[:_SHOWN])

"""The contract of backends: the stub and the example keep it, and it finds the mistakes of others."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from examples.backend.linear_backend import FILE, LinearBackend
from qinfer.backends.base import Array, Batch, Context, respond_rows
from qinfer.backends.stub import StubBackend
from qinfer.models.spec import Device, ModelSpec
from qinfer.observe.host import MemoryUse
from qinfer.tensors import from_numpy
from qinfer.testing.backend_contract import BackendContract
from tests.support.backends import ragged, spec, tensors, xy


class TestStub(BackendContract):
    has_files = False

    def create(self) -> StubBackend:
        return StubBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        return xy("stub", datatype)

    def write_ragged(self, version_dir: Path) -> ModelSpec:
        return ragged("stub")

    def expected(self, spec: ModelSpec, inputs: Mapping[str, Array], factor: int) -> dict[str, Array]:
        return {"y": inputs["x"]}


class TestLinear(BackendContract):
    datatypes = ("FP32",)

    def create(self) -> LinearBackend:
        return LinearBackend()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        weights = np.array([[factor], [-factor]], np.float32)
        np.savez(version_dir / FILE, weights=weights, bias=np.array([1], np.float32))
        return spec("linear", tensors(("x", "FP32", (2,))), tensors(("y", "FP32", (1,))))

    def expected(self, spec: ModelSpec, inputs: Mapping[str, Array], factor: int) -> dict[str, Array]:
        x = inputs["x"]
        return {"y": factor * (x[:, :1] - x[:, 1:]) + 1}


class Doubling:
    """A backend of `y = factor * x`, which subclasses spoil."""

    short_on_loop = True

    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        self.threads = int(spec.parameters.get("threads", "1"))
        self.factor = np.float32((version_dir / "factor").read_text())

    def execute(self, batch: Batch, ctx: Context) -> None:
        respond_rows(batch, ctx, {"y": batch.inputs["x"] * self.factor}, {"y": "FP32"})

    def unload(self) -> None:
        pass


class TestDoubling(BackendContract):
    datatypes = ("FP32",)
    has_files = False
    thread_parameter = "threads"
    made: Callable[[], Doubling] = Doubling

    def create(self) -> Doubling:
        return type(self).made()

    def write(self, version_dir: Path, datatype: str, factor: int) -> ModelSpec:
        (version_dir / "factor").write_text(str(factor))
        return xy("doubling", "FP32")


class Reuses(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        if not hasattr(self, "kept"):
            self.kept = np.zeros((64, 2), np.float32)
        self.kept[: batch.size] = batch.inputs["x"] * self.factor
        respond_rows(batch, ctx, {"y": self.kept[: batch.size]}, {"y": "FP32"})


class Writes(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        x = batch.inputs["x"]
        x *= self.factor
        respond_rows(batch, ctx, {"y": x}, {"y": "FP32"})


class AnswersTwice(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        super().execute(batch, ctx)
        super().execute(batch, ctx)


class Forgets(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        ctx.respond(0, (from_numpy("y", batch.inputs["x"][: batch.rows[0]] * self.factor),))


class Shares(Doubling):
    factors: dict[str, np.float32] = {}  # noqa: RUF012  the mistake itself

    def execute(self, batch: Batch, ctx: Context) -> None:
        self.factors.setdefault("first", self.factor)
        respond_rows(batch, ctx, {"y": batch.inputs["x"] * self.factors["first"]}, {"y": "FP32"})


class Leaks(Doubling):
    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        super().load(spec, version_dir, device)
        KEPT.append(os.open(version_dir / "factor", os.O_RDONLY))


class StartsThreads(Doubling):
    def load(self, spec: ModelSpec, version_dir: Path, device: Device) -> None:
        super().load(spec, version_dir, device)
        self.end = threading.Event()
        self.more = [threading.Thread(target=self.end.wait, args=(60,)) for _ in range(8)]
        for thread in self.more:
            thread.start()

    def unload(self) -> None:
        self.end.set()
        for thread in self.more:
            thread.join()


class AnswersMore(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        y = batch.inputs["x"] * self.factor
        for item, rows in enumerate(batch.rows):
            ctx.respond(item, (from_numpy("y", y[:rows]), from_numpy("z", y[:rows])))


class AnswersWithout(Doubling):
    def execute(self, batch: Batch, ctx: Context) -> None:
        x = batch.inputs.get("x", np.zeros((batch.size, 2), np.float32))
        respond_rows(batch, ctx, {"y": x * self.factor}, {"y": "FP32"})


class Measures(Doubling):
    def memory(self) -> tuple[MemoryUse, ...]:
        return (MemoryUse("CPU", 0, -1),)


KEPT: list[int] = []


@pytest.fixture
def _closed() -> Iterator[None]:
    yield
    while KEPT:
        os.close(KEPT.pop())


MISTAKES: list[tuple[type[Doubling], str]] = [
    (Reuses, "test_answers_outlive_the_next_execution"),
    (Writes, "test_inputs_may_be_read_only_and_stay_as_they_are"),
    (AnswersTwice, "test_batches_of_one_request_and_of_the_largest_size"),
    (Forgets, "test_batches_of_one_request_and_of_the_largest_size"),
    (Shares, "test_two_versions_answer_for_themselves"),
    (Leaks, "test_unload_frees_threads_files_and_processes"),
    (StartsThreads, "test_threads_are_as_many_as_configured"),
    (AnswersMore, "test_an_item_gets_the_outputs_that_it_names"),
    (AnswersWithout, "test_a_batch_that_fails_leaves_the_next_one_alone"),
    (Measures, "test_memory_is_measured_from_any_thread_and_after_the_end"),
]


@pytest.mark.usefixtures("_closed")
@pytest.mark.parametrize(("mistaken", "test"), MISTAKES, ids=[mistaken.__name__ for mistaken, _ in MISTAKES])
def test_a_mistake_is_found(
    mistaken: type[Doubling], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TestDoubling, "made", mistaken)
    monkeypatch.setattr("qinfer.testing.backend_contract.PATIENCE_S", 0.0)
    more = {"limit": 3} if test == "test_threads_are_as_many_as_configured" else {}

    with pytest.raises((AssertionError, TimeoutError, ValueError)):
        getattr(TestDoubling(), test)(tmp_path=tmp_path, **more)


def test_the_contract_needs_no_redis() -> None:
    code = "import sys, qinfer.testing.backend_contract; sys.exit('redis' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

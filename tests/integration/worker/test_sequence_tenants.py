"""Sequences of several tenants with equal ids: a model that keys its state by the correlation ID mixes none of them.

A gateway with keys, workers with real models, a real Redis. Tests share them: each has sequences of its own, or
models. `acme` is the first tenant of most models.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from onnx import helper

from qinfer.core.api_keys import Scope, add_key
from tests.support import models
from tests.support.ensembles import EnsemblesServed, ensemble, ensembles_served, scale
from tests.support.python_models import HEADER, execute, write_model

pytestmark = [pytest.mark.timeout(90), pytest.mark.asyncio(loop_scope="module")]

IDLE = "max_sequence_idle_microseconds: 60000000"

KEEPER = HEADER + (
    """
class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        return [self.step(request) for request in requests]

    def step(self, request):
        control = pb_utils.get_input_tensor_by_name(request, "CORRID")
        key = request.correlation_id() if control is None else control.as_numpy().item()
        if isinstance(key, bytes):
            key = key.decode()
        self.sums[key] = self.sums.get(key, 0) + float(x(request).flat[0])
        told = {"key": str(key), "kind": type(request.correlation_id()).__name__, "id": str(request.correlation_id())}
        return reply(np.full_like(x(request), self.sums[key]), parameters=told)
"""
)
"""Adds `x` to a sum that it keeps by the correlation ID, and never forgets, whatever the flags are."""

CALLER = execute(
    """
responses = []
for request in requests:
    call = pb_utils.InferenceRequest(
        model_name="INT64", requested_output_names=["y"], correlation_id=request.correlation_id(),
        flags=request.flags(), inputs=[pb_utils.Tensor("x", x(request))])
    answer = call.exec()
    if answer.has_error():
        raise pb_utils.TritonModelException(answer.error().message())
    responses.append(pb_utils.InferenceResponse(answer.output_tensors(), parameters=json.loads(answer.parameters())))
return responses
"""
)
"""Passes each step on to a model that keeps a sum, by the correlation ID that it sees."""

TYPES = ["INT64", "UINT64", "INT32", "UINT32", "STRING", "none", "plain", "iterative"]


def write_keeper(repository: Path, kind: str, name: str = "", code: str = KEEPER) -> None:
    """Writes a model that keeps sums, and is told ids of a type; `none` has no CORRID, `plain` no sequences."""
    control = f'control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} }}'
    has_control = kind not in {"none", "plain", "iterative"}
    more = "iterative_sequence: true" if kind == "iterative" else control if has_control else ""
    scheduling = f"sequence_batching {{ oldest {{ max_candidate_sequences: 64 }} {more} {IDLE} }}"
    options = {} if kind == "plain" else {"scheduling": scheduling}
    write_model(repository, code, name or kind, max_batch_size=4, dims=1, **options)


class Tenants:
    """Callers of several tenants, who send steps over HTTP.

    Attributes:
        scene: The gateway and the workers.
    """

    def __init__(self, scene: EnsemblesServed, keys: dict[str, str]) -> None:
        self.scene = scene
        self._keys = keys

    async def start(self, *names: str) -> None:
        """Starts a worker."""
        await self.scene.sync()
        await self.scene.worker()
        await self.scene.ready(*names)

    async def post(
        self, tenant: str, model: str, x: float, sequence: int | str = 7, *, name: str = "x", **flags: bool
    ) -> httpx.Response:
        """Sends a step; returns the reply. A number is sent as text to the model that takes texts."""
        if model == "STRING" and isinstance(sequence, int):
            sequence = f"n{sequence}"
        tensor = {"name": name, "shape": [1, 1], "datatype": "FP32", "data": [x]}
        parameters = {"sequence_id": sequence} | {f"sequence_{flag}": value for flag, value in flags.items()}
        return await self.scene.client.post(
            f"/v2/models/{model}/infer",
            json={"inputs": [tensor], "parameters": parameters},
            headers={"authorization": f"Bearer {self._keys[tenant]}"},
        )

    async def send(self, tenant: str, model: str, x: float, sequence: int | str = 7, **flags: Any) -> Any:
        """Sends a step; returns the body of the reply."""
        reply = await self.post(tenant, model, x, sequence, **flags)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def sum(self, tenant: str, model: str, x: float, sequence: int | str = 7, **flags: Any) -> float:
        """Sends a step; returns the sum."""
        return float((await self.send(tenant, model, x, sequence, **flags))["outputs"][0]["data"][0])

    async def told(self, tenant: str, model: str, sequence: int | str = 7) -> dict[str, str]:
        """Sends a sequence of one step; returns what the model was told."""
        reply = await self.send(tenant, model, 0, sequence, start=True, end=True)
        return {name: reply["parameters"][name] for name in ("key", "kind", "id")}


@asynccontextmanager
async def tenants_served(path: Path) -> AsyncIterator[Tenants]:
    """Runs a gateway with the keys of three tenants for the models in `path / "repository"`, and no worker yet."""
    file = path / "keys.json"
    keys = {name: add_key(file, name, (Scope.INFER,), name)[1] for name in ("acme", "evil", "third")}
    async with ensembles_served(path / "repository", auth={"mode": "keys", "keys_file": str(file)}) as scene:
        yield Tenants(scene, keys)


def write_fronts(repository: Path) -> None:
    """Writes models that pass their steps on: two to each of `numbers` and `texts`, and two to `INT64`."""
    for kind, called in (("INT64", "numbers"), ("STRING", "texts")):
        write_keeper(repository, kind, called)
        for front in ("plain", "none"):
            write_keeper(repository, front, f"{front}-{called}", CALLER.replace("INT64", called))
    write_keeper(repository, "none", "front", CALLER)
    write_model(repository, CALLER, "batches", max_batch_size=4, dims=1, delay_us=50_000)


def write_few(repository: Path) -> None:
    """Writes models of four slots: `few` and `busy` in Python, whose sequences stay open, and `kept` in ONNX."""
    scheduling = f"sequence_batching {{ {models.DIRECT} {IDLE} }}"
    for name in ("few", "busy"):
        write_model(repository, KEEPER, name, max_batch_size=4, dims=1, scheduling=scheduling)
    models.accumulator(repository, "kept", strategy=models.DIRECT, more=IDLE)
    with (repository / "kept" / "config.pbtxt").open("a") as config:
        config.write("\ninstance_group { count: 1 kind: KIND_CPU }\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenants(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tenants]:
    path = tmp_path_factory.mktemp("tenants")
    repository = path / "repository"
    for kind in TYPES:
        write_keeper(repository, kind)
    scale(repository, "once", 1.0, width=1)
    steps = ("once", {"x": "x"}, {"y": "scaled"}), ("INT64", {"x": "scaled"}, {"y": "y"})
    ensemble(repository, "sums", *steps, width=1, max_batch_size=4)
    write_fronts(repository)
    write_few(repository)
    async with tenants_served(path) as one:
        await one.start()
        yield one


async def check_apart(tenants: Tenants, model: str, sequence: int | str = 7) -> None:
    """Checks that a tenant neither reads nor writes what a model keeps for another."""
    assert await tenants.sum("acme", model, 0, sequence, start=True) == 0
    assert await tenants.sum("evil", model, 0, sequence, start=True) == 0
    assert await tenants.sum("acme", model, 987654, sequence) == 987654

    read = await tenants.sum("evil", model, 0, sequence)
    await tenants.sum("evil", model, 1000000, sequence)

    assert read == 0
    assert await tenants.sum("acme", model, 0, sequence) == 987654
    assert await tenants.sum("evil", model, 0, sequence) == 1000000


@pytest.mark.parametrize("kind", TYPES)
async def test_a_tenant_neither_reads_nor_writes_the_state_of_another(tenants: Tenants, kind: str) -> None:
    await check_apart(tenants, kind)


@pytest.mark.parametrize("kind", ["STRING", "none", "plain"])
async def test_texts_as_ids_are_told_apart(tenants: Tenants, kind: str) -> None:
    await check_apart(tenants, kind, "call")


async def test_the_first_tenant_sees_its_ids_and_others_see_numbers_of_the_type(tenants: Tenants) -> None:
    first = {kind: await tenants.told("acme", kind) for kind in TYPES}
    other = {kind: await tenants.told("evil", kind) for kind in TYPES}
    third = {kind: await tenants.told("third", kind) for kind in TYPES}

    assert first.pop("STRING") == {"key": "n7", "kind": "str", "id": "n7"}
    assert first == {kind: {"key": "7", "kind": "int", "id": "7"} for kind in TYPES if kind != "STRING"}
    assert other["STRING"] == {"key": "qinfer:evil:tn7", "kind": "str", "id": "qinfer:evil:tn7"}
    for kind in set(TYPES) - {"STRING"}:
        assert other[kind]["kind"] == "int"
        assert other[kind]["key"] == other[kind]["id"]
        assert len({"7", other[kind]["key"], third[kind]["key"]}) == 3
        assert 0 < int(other[kind]["key"]) < 2 ** (31 if kind.endswith("32") else 53)


async def test_a_text_that_looks_like_that_of_another_tenant_is_told_apart(tenants: Tenants) -> None:
    await tenants.told("acme", "STRING")
    others = (await tenants.told("evil", "STRING", "same"))["key"]
    await tenants.sum("evil", "STRING", 5, "same", start=True)

    assert await tenants.sum("acme", "STRING", 0, others, start=True) == 0
    assert (await tenants.told("acme", "STRING", "evil:same"))["key"] == "evil:same"


async def test_the_number_of_another_tenant_names_no_sequence_of_it(tenants: Tenants) -> None:
    """The first tenant knows the number, and names it while the other's sequence is open, and once it has ended."""
    await tenants.told("acme", "INT64")
    await tenants.sum("evil", "INT64", 5, 8, start=True)
    number = int((await tenants.send("evil", "INT64", 0, 8))["parameters"]["key"])

    assert await tenants.sum("acme", "INT64", 1, number, start=True) == 1
    assert await tenants.sum("evil", "INT64", 0, 8, end=True) == 5
    assert await tenants.sum("acme", "INT64", 1, number + 1, start=True) == 1


async def test_a_client_is_told_its_own_id(tenants: Tenants) -> None:
    """Also by errors of the worker, and where another tenant has begun that sequence."""
    await tenants.told("acme", "INT64", 9)

    missing = await tenants.post("evil", "INT64", 0, 9)
    await tenants.sum("evil", "INT64", 5, 9, start=True)
    await tenants.sum("evil", "INT64", 5, 9, end=True)
    ended = await tenants.post("evil", "INT64", 0, 9)

    for reply in (missing, ended):
        assert "inference request for sequence 9 to model 'INT64' must specify the START flag" in reply.json()["error"]


async def test_steps_of_an_ensemble_are_told_apart(tenants: Tenants) -> None:
    await tenants.told("acme", "INT64")

    await check_apart(tenants, "sums", 10)


@pytest.mark.parametrize("kind", ["plain", "none"])
@pytest.mark.parametrize("called", ["numbers", "texts"])
async def test_calls_with_the_id_that_a_model_sees_are_told_apart(tenants: Tenants, kind: str, called: str) -> None:
    """They are steps of their caller's sequence, also where the first tenant of the called model is another one."""
    sequence: int | str = {"plain": 7, "none": 8}[kind] if called == "numbers" else kind
    await tenants.told("evil", called, "first" if called == "texts" else 1)

    await check_apart(tenants, f"{kind}-{called}", sequence)


async def test_calls_of_a_batch_of_several_tenants_are_told_apart(tenants: Tenants) -> None:
    names = ("acme", "evil", "third")

    async def step(**flags: bool) -> list[float]:
        factors = zip(names, (1, 10, 100), strict=True)
        return list(
            await asyncio.gather(*[tenants.sum(name, "batches", factor, 11, **flags) for name, factor in factors])
        )

    assert [await step(start=True), await step(), await step(end=True)] == [[1, 10, 100], [2, 20, 200], [3, 30, 300]]


async def test_the_called_model_has_the_sequence_of_the_client(tenants: Tenants) -> None:
    """What the client has begun at the called model itself goes on by a call."""
    await tenants.told("acme", "front")
    await tenants.told("acme", "INT64", 1)
    await tenants.sum("evil", "front", 0, 12, start=True)

    before = await tenants.sum("evil", "INT64", 40, 12)

    assert before == 40
    assert await tenants.sum("evil", "front", 2, 12) == 42


async def test_an_onnx_model_is_told_apart_across_workers(tmp_path: Path) -> None:
    """The number stays the same when the sequence goes on at another worker, whether its own drains or dies."""
    repository = tmp_path / "repository"
    nodes = [
        helper.make_node("Add", ["x", "STATE_IN"], ["y"]),
        helper.make_node("Identity", ["y"], ["STATE_OUT"]),
        helper.make_node("Identity", ["CORRID"], ["SEEN"]),
    ]
    own, state = [("x", "FP32", (1,))], ("FP32", (1,))
    inputs = [*own, ("STATE_IN", *state), ("CORRID", "INT64", (1,))]
    outputs = [("y", "FP32", (1,)), ("SEEN", "INT64", (1,))]
    models.write(repository, "seen", nodes, inputs, [*outputs, ("STATE_OUT", *state)], max_batch_size=4)
    control = 'control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }'
    kept = 'state { input_name: "STATE_IN" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] }'
    text = models.sequence_batching(models.OLDEST, control, kept, IDLE)
    (repository / "seen" / "config.pbtxt").write_text(models.config("seen", own, outputs, 4, text))
    async with tenants_served(tmp_path) as tenants:
        await tenants.start()
        scene = tenants.scene

        async def step(tenant: str, **flags: bool) -> tuple[float, int]:
            found = {
                each["name"]: each["data"][0] for each in (await tenants.send(tenant, "seen", 1, **flags))["outputs"]
            }
            return found["y"], found["SEEN"]

        first = {tenant: await step(tenant, start=True) for tenant in ("acme", "evil")}
        await scene.worker("w2")
        await scene.stop("w1")
        second = {tenant: await step(tenant) for tenant in ("acme", "evil")}
        await scene.kill("w2")
        await scene.worker("w3")
        third = {tenant: await step(tenant) for tenant in ("acme", "evil")}

    assert first["acme"] == (1.0, 7)
    number = first["evil"][1]
    assert number != 7
    assert second == {"acme": (2.0, 7), "evil": (2.0, number)}
    assert third == {"acme": (3.0, 7), "evil": (3.0, number)}


async def test_a_tenant_that_waits_gets_a_slot_of_one_with_more(tenants: Tenants) -> None:
    """Where the state is in the model's memory the sequence that had the slot is lost, and its caller is told why."""
    for number in range(1, 5):
        await tenants.sum("evil", "few", 1, number, start=True)

    assert await tenants.sum("acme", "few", 5, "mine", start=True) == 5

    outcomes = [await tenants.post("evil", "few", 1, number) for number in range(1, 5)]
    lost = [reply.json()["error"] for reply in outcomes if reply.status_code == 503]
    assert sorted(reply.status_code for reply in outcomes) == [200, 200, 200, 503]
    assert "another tenant waited for a slot of the model" in lost[0]
    assert await tenants.sum("acme", "few", 5, "mine", end=True) == 10


async def test_a_sequence_with_a_stored_state_gives_its_slot_up_and_goes_on(tenants: Tenants) -> None:
    async def step(tenant: str, number: int, **flags: bool) -> float:
        return await tenants.sum(tenant, "kept", 1, number, name="INPUT", **flags)

    for number in range(1, 5):
        assert await step("evil", number, start=True) == 1

    assert [await step("acme", 7, start=True), await step("acme", 7), await step("acme", 7, end=True)] == [1, 2, 3]

    assert [await step("evil", number) for number in range(1, 5)] == [2, 2, 2, 2]


async def test_a_tenant_that_keeps_its_slots_busy_shares_them(tenants: Tenants) -> None:
    """Steps of all four follow one another without a pause, and what waits behind them is the same tenant's."""

    async def hold(number: int) -> None:
        while True:
            reply = await tenants.post("evil", "busy", 1, number, start=True)
            while reply.status_code == 200:
                reply = await tenants.post("evil", "busy", 1, number)

    async with asyncio.TaskGroup() as tasks:
        holding = [tasks.create_task(hold(number)) for number in range(1, 9)]
        mine = [await asyncio.gather(*[tenants.sum("acme", "busy", 1, each, start=True) for each in (1, 2)])]
        mine += [await asyncio.gather(*[tenants.sum("acme", "busy", 1, each) for each in (1, 2)]) for _ in range(3)]
        for task in holding:
            task.cancel()

    assert mine == [[1, 1], [2, 2], [3, 3], [4, 4]]

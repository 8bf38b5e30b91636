"""Texts that become code where a page does not escape them, in everything that the console shows."""

import json
import logging
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.core.messages import InferRequest, Response
from qinfer.errors import BrokerUnavailable
from qinfer.jobs.job import JobSpec, JobState, Output, encode_spec
from qinfer.jobs.queue.jobs import Jobs
from qinfer.jobs.queue.records import JobAddress, JobRecord
from qinfer.labeling.tasks import Board, LabelState, LabelTask, LabelTasks
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.state import DesiredState, Executing, ModelPause, State, StoredModel, VersionState, WorkerRecord
from qinfer.queue import keys
from qinfer.queue.entries import Acceptance, EntryAddress, Lane, RequestOutcome, RequestState, Settlement
from qinfer.tensors import Tensor, from_numpy
from qinfer.wire.frame import encode_request, encode_responses
from qinfer_api.requests.records import failed_outcome
from tests.e2e.console.scene import put
from tests.integration.console.test_console_security import HOSTILE
from tests.support.gateway import Running, TenantScene, declare_more

KINDS = (
    "worker", "host", "device", "execution", "unloaded", "gateway", "bulk", "by", "reason", "code", "letter", "tenant",
    "tensor", "text", "parameter", "message", "label", "error", "file", "log", "shard", "metadata", "audit",
    "task", "filter",
)  # fmt: skip
"""The kinds of texts of the scene."""
CLASSES = 8
"""The classes of an answer that a page shows."""
JOB, LETTERS_OF, RESULTS_OF = "damaged-job", "text", "labelled"

HOSTILE_NAMES = [text for text in HOSTILE if not set('/\\{}"') & set(text) and text.isprintable()]
"""The texts that can be names of models."""


def told(kind: str) -> list[str]:
    """Returns the hostile texts of a kind, each recognizable; as JavaScript, the kind is a comment."""
    return [f"{text}//{kind}" for text in HOSTILE]


async def fill(scene: TenantScene) -> None:
    """Puts hostile texts into each kind of record, of the administrator's tenant where a page shows only that one."""
    running = scene.running
    await declare_more(running, *HOSTILE_NAMES, is_ready=True)
    await _add_tensor_names(running)
    await _add_workers(running)
    await _add_letters(running)
    await _add_requests(running)
    await _add_job(running)
    await _add_tasks(running)
    await running.refresh()
    _note_acts(running)
    for name in HOSTILE_NAMES:
        endpoint = {"targets": [{"model": name, "version": 1, "role": "stable"}]}
        reply = await scene.clients["admin"].put(f"/v1/endpoints/of-{HOSTILE_NAMES.index(name)}", json=endpoint)
        assert reply.status_code == 200, reply.text
    for text in told("filter"):
        chosen = {"model": "echo", "error": text, "id_prefix": text}
        body = {"action": "replay", "filter": chosen, "dry_run": True}
        reply = await scene.clients["admin"].post("/v1/operations", json=body)
        assert reply.status_code < 300, reply.text


async def _add_tensor_names(running: Running) -> None:
    """Writes a model with hostile names of inputs, and one with hostile labels."""
    named = "".join(f"input {{ name: {_quoted(text)} data_type: TYPE_STRING dims: [1] }}" for text in told("tensor"))
    one = 'output {{ name: "y" data_type: TYPE_FP32 dims: [{0}] }}'.format
    await _declare(running, "named", f"{named} {one(1)}", ())
    given = 'input { name: "x" data_type: TYPE_FP32 dims: [1] }'
    await _declare(running, RESULTS_OF, f"{given} {one(len(HOSTILE))}", tuple(told("label")))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


async def _declare(running: Running, name: str, tensors: str, labels: tuple[str, ...]) -> None:
    config = to_json(normalise(parse(f'name: "{name}" backend: "stub" max_batch_size: 8 {tensors}'), name))
    await running.store.put_model(StoredModel(name, 1, config, (1,), labels={"y": labels}))
    await running.store.set_desired(DesiredState(name, 1))
    await running.delivery.ensure([Lane(name, 1)])
    ready = {name: {1: VersionState(State.READY, 1)}}
    await running.store.heartbeat(WorkerRecord(id=f"of {name}", started_at=0.0, models=ready), ttl_s=3600)


async def _add_workers(running: Running) -> None:
    """Workers that could not load a model, with a long execution; and pauses of versions, and other processes."""
    for number, text in enumerate(HOSTILE):
        failed = {"pair": {1: VersionState(State.UNAVAILABLE, 1, f"{text}//unloaded")}}
        long = Executing("pair", 1, 0.0, 400.0, 0.0, f"{text}//execution")
        record = WorkerRecord(
            id=f"{text}//worker", started_at=1.0, models=failed, host=f"{text}//host", device=f"{text}//device",
            long=(long,),
        )  # fmt: skip
        await running.store.heartbeat(record, ttl_s=3600)
        await running.store.report_liveness("gateway", f"{text}//gateway", 3600)
        await running.store.report_liveness("bulk", f"{text}//bulk", 3600)
        pause = ModelPause(model="pair", version=number + 2, by=f"{text}//by", reason=f"{text}//reason")
        await running.store.put_pause(pause)


async def _add_letters(running: Running) -> None:
    """Buries one request for each text, and then one with all of them in its tensors and parameters."""
    lane = Lane(LETTERS_OF, 1, "p32")
    await running.delivery.ensure([lane])
    everything = tuple(_text_tensor(f"{text}//tensor", f"{text}//text") for text in HOSTILE)
    contents: list[tuple[str, tuple[Tensor, ...]]] = [*((text, ()) for text in HOSTILE), ("the last", everything)]
    for text, tensors in contents:
        parameters = dict.fromkeys(told("parameter"), "a value") if tensors else {}
        request = InferRequest(
            model=LETTERS_OF, version=1, id=f"{text}//letter", inputs=tensors, timeout_s=30.0,
            parameters=parameters, tenant=f"{text}//tenant",
        )  # fmt: skip
        await put(running.delivery, lane, request)
        (lease,) = await running.delivery.fetch([lane], "test", 1, 5)
        await running.delivery.bury(lease, request.id, f"{text}//code", f"{text}//reason")


def _text_tensor(name: str, text: str) -> Tensor:
    return from_numpy(name, np.array([[text.encode()]], dtype=object))


async def _add_requests(running: Running) -> None:
    """Stores a failed request for each text, and ended ones whose best classes have hostile labels."""
    stored = running.delivery.requests
    for number, text in enumerate(HOSTILE):
        address = await _accept(running, "echo", f"failed-{number}", f"{text}//tenant")
        failed = failed_outcome(address, RequestState.FAILED, BrokerUnavailable(f"{text}//message"), 1)
        outcome = msgspec.structs.replace(failed, code=f"{text}//code")
        await stored.settle([Settlement(address=address, outcome=outcome)])
    for number, scores in enumerate(_best_classes()):
        address = await _accept(running, RESULTS_OF, f"ended-{number}", "ops")
        outputs = (from_numpy("y", scores), _text_tensor(told("tensor")[number], told("text")[number]))
        response = Response(request_id=address.id, model=RESULTS_OF, version=1, outputs=outputs)
        ended = RequestOutcome(state=RequestState.SUCCEEDED, blob=encode_responses([response]), attempt=1)
        await stored.settle([Settlement(address=address, outcome=ended)])


def _best_classes() -> Iterator[npt.NDArray[np.float32]]:
    for first in range(0, len(HOSTILE), CLASSES):
        scores = np.zeros((1, len(HOSTILE)), np.float32)
        scores[0, first : first + CLASSES] = 1.0
        yield scores


async def _accept(running: Running, model: str, request_id: str, tenant: str) -> EntryAddress:
    address = EntryAddress(model, 0, f"{request_id}@{tenant}")
    frame = encode_request(InferRequest(model=model, inputs=(), id=address.id, version=1))
    acceptance = Acceptance(
        address=address, lane=Lane(model, 1, "p9"), frame=frame, timeout_s=3600.0, body_hash=request_id, tenant=tenant
    )
    await running.delivery.ensure([acceptance.lane])  # no worker reads it
    await running.delivery.requests.accept(acceptance)
    return address


async def _add_job(running: Running) -> None:
    """Stores a failed job for each text, and one with all of them in its files, shards and log."""
    jobs = Jobs(running.delivery)
    files = tuple(f"s3://bucket/{text}//file" for text in HOSTILE)
    everything = JobSpec(
        "echo",
        files,
        Output("s3://bucket/" + told("output")[0]),
        version=1,
        metadata=dict.fromkeys(told("metadata"), ""),
    )
    specs = [JobSpec("echo", ("s3://bucket/in",), Output(f"s3://bucket/{text}"), version=1) for text in told("output")]
    errors = told("error")
    for number, spec in enumerate([everything, *specs]):
        name = JOB if spec is everything else f"job-{number}"
        record = JobRecord(
            id=f"{name}@ops", model="echo", version=1, tenant="ops", state=JobState.FAILED, spec=encode_spec(spec),
            rows=10, shards=len(HOSTILE), ended_at=1.0, error=errors[number - 1], endpoint=errors[number - 1],
        )  # fmt: skip
        assert await jobs.create(record)
    outcomes = JobAddress("echo", 0, f"{JOB}@ops").part("outcomes")
    words = [word for number, text in enumerate(told("shard")) for word in (number, f"5 1 1 {text}".encode())]
    await running.delivery.router.call(keys.slot(outcomes), b"HSET", outcomes, *words)
    for text in told("log"):
        await jobs.note(f"{JOB}@ops", text)


async def _add_tasks(running: Running) -> None:
    """Puts failed tasks of Label Studio on boards, each of which shows its first."""
    tasks = LabelTasks(running.delivery)
    for number, text in enumerate(told("task")):
        board = Board("echo", "ops", number + 1)
        waiting = LabelTask(task=1, request_id="r", version=1)
        await tasks.put(board, [waiting], ttl_s=3600, limit=10)
        failed = LabelTask(task=1, request_id="r", version=1, state=LabelState.FAILED, error=text)
        assert await tasks.move(board, [failed], ttl_s=3600) == [True]


def _note_acts(running: Running) -> None:
    for text in told("audit"):
        record = logging.LogRecord("audit", logging.INFO, "", 0, text, (), None)
        for name in ("tenant", "key", "act", "path", "peer", "outcome"):
            setattr(record, name, text)
        running.gateway._console._parts.audit.emit(record)

"""Groups of models that a server has at once, and the requests that they get.

    sequences   `plain`      the network of `tiny`, without a state: what a step is compared with
                `implicit`   the same with a state of 16 numbers, which the server keeps
                `explicit`   a sum in the Python backend, which keeps it by the correlation ID; strategy `oldest`
                `direct`     the same with strategy `direct`
    streams     `stream`     100 responses of one number to each request, from the Python backend
                `in_process` the same from a backend in the worker's own process
    pipelines   `single`     the network of `tiny`, from the same callers: what a step is compared with
                `chain`      an ensemble of three such networks, one behind the other
                `cached`     the network of `tiny` with a response cache, always asked the same
    traffic     `open`       the network of `tiny`, from the same callers: what the others are compared with
                `bounded`    the same with a `max_queue_size`, which is never reached
                `split`      an endpoint that shares out its requests between two versions of that network

Triton's Python backend has no implicit state, and its wheel no response cache: `explicit`, `direct`, `stream`,
`single` and `chain` are measured there, too.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import environments, inprocess, load, measuring, processes, servers
from benchmarks.bars import QINFER, TRITON
from benchmarks.bodies import (
    GRPC,
    GRPC_PREFIX_BYTES,
    JSON,
    answer,
    check_output,
    encode,
    grpc_reply,
    stream_answers,
)
from benchmarks.callers import FIRST_ID, Calls
from benchmarks.models import MAX_BATCH_SIZE, MODEL_PY, MODELS, THREADS, FloatArray, mlp
from benchmarks.results import Sample, Setting

STEPS = 50
"""Steps of a sequence."""
RESPONSES = 100
"""Responses of a stream."""
WIDTH = 16
_HERE = environments.HERE / "stateful_models"
_BACKEND = "bench_counting"
_CHECKED_STEPS = 3
_CACHE_BYTES = 2**20
_EXAMPLE = MODELS["tiny"].example()

_SCHEDULER = "sequence_batching {{ {strategy} max_sequence_idle_microseconds: 10000000 {more} }}"
_OLDEST, _DIRECT = "oldest { max_candidate_sequences: 1024 }", "direct { }"
_STATE = f'state {{ input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}'
_CONTROLS = "".join(
    f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} }} }} '
    for name, kind in (
        ("start", "START int32_false_true: [ 0, 1 ]"),
        ("end", "END int32_false_true: [ 0, 1 ]"),
        ("ready", "READY int32_false_true: [ 0, 1 ]"),
        ("id", "CORRID data_type: TYPE_UINT64"),
    )
)
_DECOUPLED = (
    "dynamic_batching { } model_transaction_policy { decoupled: true } "
    f'parameters {{ key: "responses" value {{ string_value: "{RESPONSES}" }} }}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and how it is asked.

    Attributes:
        name: The model's name.
        group: The group of the models that a server has at once.
        callers: Callers, each with a connection.
        servers: The servers that have it.
        encodings: The encodings it is asked in.
        backend: Its backend.
        config: What its configuration has besides backend, inputs and outputs.
        width: Numbers of its output.
        source: The file of a model of the Python backend.
        steps: Steps of a sequence; 0 = requests are no steps.
        responses: Responses to a request; 0 = it is not decoupled.
        parts: Networks of an ensemble, one behind the other; 0 = it is none.
        versions: Equal versions that an endpoint of this name shares out its requests between; 0 = it is a model.
    """

    name: str
    group: str
    callers: int
    servers: tuple[str, ...]
    encodings: tuple[str, ...] = (JSON, GRPC)
    backend: str = "python"
    config: str
    width: int = WIDTH
    source: str = ""
    steps: int = 0
    responses: int = 0
    parts: int = 0
    versions: int = 0


SEQUENCES, STREAMS, PIPELINES, TRAFFIC = "sequences", "streams", "pipelines", "traffic"
GROUPS = (SEQUENCES, STREAMS, PIPELINES, TRAFFIC)
_BOTH = (QINFER, TRITON)
_EXPLICIT = Case(
    name="explicit",
    group=SEQUENCES,
    callers=64,
    servers=_BOTH,
    config=_SCHEDULER.format(strategy=_OLDEST, more=_CONTROLS),
    source="running_sum.py",
    steps=STEPS,
)
_STREAM = Case(
    name="stream",
    group=STREAMS,
    callers=64,
    servers=_BOTH,
    encodings=(GRPC,),
    config=_DECOUPLED,
    width=1,
    source="counter.py",
    responses=RESPONSES,
)
_PLAIN = Case(
    name="plain",
    group=SEQUENCES,
    callers=128,
    servers=(QINFER,),
    backend="onnxruntime",
    config="dynamic_batching { }",
    width=8,
)
_SINGLE = replace(_PLAIN, name="single", group=PIPELINES, callers=64, servers=_BOTH)
_OPEN = replace(_PLAIN, name="open", group=TRAFFIC, callers=64)
CASES = (
    _PLAIN,
    replace(_PLAIN, name="implicit", config=_SCHEDULER.format(strategy=_OLDEST, more=_STATE), steps=STEPS),
    _EXPLICIT,
    replace(_EXPLICIT, name="direct", config=_SCHEDULER.format(strategy=_DIRECT, more=_CONTROLS)),
    _STREAM,
    replace(_STREAM, name="in_process", servers=(QINFER,), backend=_BACKEND, source=""),
    _SINGLE,
    replace(_SINGLE, name="chain", parts=3),
    replace(_SINGLE, name="cached", servers=(QINFER,), config="dynamic_batching { } response_cache { enable: true }"),
    _OPEN,
    replace(_OPEN, name="bounded", config="dynamic_batching { default_queue_policy { max_queue_size: 1024 } }"),
    replace(_OPEN, name="split", versions=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group of models that servers have at once.

    Attributes:
        name: One of `GROUPS`.
        settings: The models, encodings and servers that take turns.
        turns: Clean turns that each of them needs.
    """

    name: str
    settings: tuple[Setting, ...]
    turns: int

    @property
    def servers(self) -> list[str]:
        """The names of the servers."""
        return list(dict.fromkeys(setting.server for setting in self.settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A server that runs, with what is asked of it."""

    server: servers.Server
    launch: servers.Launch


def group(name: str, turns: int) -> Group:
    """Returns a whole group; settings that are compared with one another are neighbours."""
    settings = [
        Setting(model=case.name, encoding=encoding, connections=case.callers, server=server)
        for case in CASES
        if case.group == name
        for encoding in case.encodings
        for server in case.servers
    ]
    return Group(name=name, settings=tuple(settings), turns=turns)


def measure(
    one: Group,
    directory: Path,
    seconds: tuple[float, float],
    tally: measuring.Tally,
    show: Callable[[Sample], None],
) -> None:
    """Measures a group: starts its servers, checks and warms each model, and lets all of them take turns.

    Args:
        one: The group.
        directory: Where models and servers are written.
        seconds: Length of a turn, and of the load before the first one.
        tally: The turns of the run.
        show: Is told each turn.

    Raises:
        ServerFailed: A server did not come up.
        WrongAnswer: It answered something else than it should.
        LoadFailed: A load generator did not run.
        TooNoisy: Too many turns were disturbed.
    """
    turn_s, warm_up_s = seconds
    with ExitStack() as stack:
        places = {name: stack.enter_context(_started(one, name, directory)) for name in one.servers}
        for encoding in dict.fromkeys(setting.encoding for setting in one.settings):
            contestants = []
            for setting in (setting for setting in one.settings if setting.encoding == encoding):
                place = places[setting.server]
                calls = _calls(place.launch, _case(setting), encoding, check(place.launch, _case(setting), encoding))
                load.run_callers(calls, warm_up_s)
                contestants.append(
                    measuring.Contestant(
                        setting=setting,
                        turns=one.turns,
                        generate=partial(load.run_callers, calls, turn_s),
                        server=place.server,
                    )
                )
            measuring.take_turns(contestants, tally, show)
            for setting in (contestant.setting for contestant in contestants):
                check(places[setting.server].launch, _case(setting), encoding)


def _case(setting: Setting) -> Case:
    return next(case for case in CASES if case.name == setting.model)


@contextmanager
def _started(one: Group, name: str, directory: Path) -> Iterator[_Place]:
    """Starts a server with the models of a group that it has."""
    repository = directory / "models" / f"{one.name}-{name}"
    for written in (repository, _endpoints(repository)):
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
    cases = list(dict.fromkeys(_case(setting) for setting in one.settings if setting.server == name))
    for case in cases:
        write_model(case, repository, name)
    launch = servers.Launch(
        model="",
        model_file=repository,
        repository=repository,
        directory=directory / "servers" / name,
        port=processes.free_port(),
        grpc_port=processes.free_port(),
    )

    def check_all(_: servers.Server) -> None:
        for case in cases:
            check(launch, case, case.encodings[0])

    kind = replace(servers.KINDS[name], commands=lambda launch: [_command(name, launch, directory)])
    with servers.started(kind, launch, check_all) as server:
        yield _Place(server=server, launch=launch)


def _command(server: str, launch: servers.Launch, directory: Path) -> servers.Command:
    if server == TRITON:
        return servers.triton_command(launch, launch.repository)
    [command] = servers.KINDS[server].commands(launch)
    command = replace(command, argv=(*command.argv, "--cache-config", f"local,size={_CACHE_BYTES}"))
    more = {
        "PYTHONPATH": _install_backend(directory / "packages"),
        "QINFER_ENDPOINTS__PATH": str(_endpoints(launch.repository)),
    }
    return replace(command, env={**command.env, **more})


def _install_backend(packages: Path) -> str:
    """Lets workers find our backend as that of an installed package; returns the PYTHONPATH for it."""
    distribution = packages / "qinfer_bench-0.dist-info"
    distribution.mkdir(parents=True, exist_ok=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: qinfer-bench\nVersion: 0\n")
    target = "benchmarks.stateful_models.counting_backend:CountingBackend"
    (distribution / "entry_points.txt").write_text(f"[qinfer.backends]\n{_BACKEND} = {target}\n")
    return os.pathsep.join((str(packages), str(environments.ROOT)))


def write_model(case: Case, repository: Path, server: str) -> None:
    """Writes the model of a case into a repository for a server."""
    if case.parts:
        _write_ensemble(case, repository, server)
        return
    if case.versions:
        _write_endpoint(case, repository, server)
        return
    version = repository / case.name / "1"
    version.mkdir(parents=True)
    backend = case.backend
    if case.source:
        shutil.copy(_HERE / case.source, version / "model.py")
    elif backend == "onnxruntime":
        onnx.save(_network(case), _model_file(case, repository))
    if backend == "onnxruntime" and server == TRITON:
        backend = "python"
        shutil.copy(MODEL_PY, version)
    threads = "".join(
        f'parameters {{ key: "{key}_op_thread_count" value {{ string_value: "{THREADS}" }} }}\n'
        for key in ("intra", "inter")
    )
    instances = "instance_group [ { kind: KIND_CPU count: 1 } ]"
    text = f'backend: "{backend}"\n{_tensors(case)}{instances}\n{threads}{case.config}\n'
    (version.parent / "config.pbtxt").write_text(text)


def _tensors(case: Case) -> str:
    return (
        f"max_batch_size: {MAX_BATCH_SIZE}\n"
        f'input {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}\n'
        f'output {{ name: "y" data_type: TYPE_FP32 dims: [ {case.width} ] }}\n'
    )


def _write_ensemble(case: Case, repository: Path, server: str) -> None:
    """Writes an ensemble, and the networks that it is made of."""
    steps = _steps(case)
    for step in steps:
        write_model(step, repository, server)
    (repository / case.name / "1").mkdir(parents=True)
    names = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
    flow = "\n".join(
        f'step {{ model_name: "{step.name}" model_version: -1 input_map {{ key: "x" value: "{given}" }} '
        f'output_map {{ key: "y" value: "{made}" }} }}'
        for step, (given, made) in zip(steps, pairwise(names), strict=True)
    )
    text = f'platform: "ensemble"\n{_tensors(case)}ensemble_scheduling {{\n{flow}\n}}\n'
    (repository / case.name / "config.pbtxt").write_text(text)


def _write_endpoint(case: Case, repository: Path, server: str) -> None:
    """Writes a model with equal versions, and the endpoint that shares out its requests between them evenly."""
    model = _of_endpoint(case)
    write_model(model, repository, server)
    for version in range(2, case.versions + 1):
        shutil.copytree(repository / model.name / "1", repository / model.name / str(version))
    roles = ["stable", *["canary"] * (case.versions - 1)]
    targets = [
        {"model": model.name, "version": version, "role": role, "weight": 1 / case.versions}
        for version, role in enumerate(roles, 1)
    ]
    (_endpoints(repository) / f"{case.name}.json").write_text(json.dumps({"targets": targets}))


def _of_endpoint(case: Case) -> Case:
    """Returns the model whose versions an endpoint shares out its requests between."""
    return replace(case, name=f"{case.name}_model", versions=0, config=f"{case.config} version_policy {{ all {{ }} }}")


def _endpoints(repository: Path) -> Path:
    """Returns the directory of the endpoints' declarations, beside the models."""
    return repository.with_name(f"{repository.name}-endpoints")


def _steps(case: Case) -> list[Case]:
    """Returns the networks of an ensemble; all but the last have outputs as wide as their inputs."""
    names = [f"{case.name}_{number}" for number in range(1, case.parts + 1)]
    return [replace(case, name=name, parts=0, width=case.width if name == names[-1] else WIDTH) for name in names]


def _network(case: Case) -> onnx.ModelProto:
    if case.steps:
        return _with_state()
    return MODELS["tiny"].build() if case.width == 8 else mlp("wide", (WIDTH, 64, case.width), 1)


def _model_file(case: Case, repository: Path) -> Path:
    return repository / case.name / "1" / "model.onnx"


def _with_state() -> onnx.ModelProto:
    """Makes `tiny` of the sum `u` of input and state, whose half is the next state."""
    model = MODELS["tiny"].build()
    graph = model.graph
    for node in graph.node:
        node.input[:] = ["u" if name == "x" else name for name in node.input]
    graph.node.insert(0, helper.make_node("Add", ["x", "s"], ["u"]))
    graph.node.append(helper.make_node("Mul", ["u", "half"], ["t"]))
    graph.initializer.append(helper.make_tensor("half", TensorProto.FLOAT, [], [0.5]))
    for name, side in (("s", graph.input), ("t", graph.output)):
        side.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]))
    onnx.checker.check_model(model)
    return model


def check(launch: servers.Launch, case: Case, encoding: str) -> int:
    """Checks the answers of a server to a few steps or to a stream; returns the bytes that answer a call of gRPC.

    Raises:
        WrongAnswer: They are wrong, or errors.
    """
    url = _address(launch, case, encoding)
    if case.responses:
        content, _ = encode(case.name, encoding, _EXAMPLE)
        outputs, size = stream_answers(url, content, case.responses)
        check_output(url, np.concatenate(outputs), np.arange(case.responses, dtype=np.float32)[:, None])
        return size
    for step, expected in enumerate(expected_outputs(case, launch.repository), 1):
        content, headers = encode(case.name, encoding, _EXAMPLE, _parameters(case, step))
        check_output(url, answer(url, encoding, content, headers), expected)
    content, _ = encode(case.name, GRPC, _EXAMPLE, _parameters(case, 0))
    return GRPC_PREFIX_BYTES + len(grpc_reply(_address(launch, case, GRPC), content))


def expected_outputs(case: Case, repository: Path) -> Iterator[FloatArray]:
    """Yields what the first steps of a sequence are answered with, made in process."""
    if case.backend == "python":
        yield from (_EXAMPLE * step for step in range(1, _CHECKED_STEPS + 1))
        return
    if case.parts:
        y = _EXAMPLE
        for step in _steps(case):
            (y,) = inprocess.session(_model_file(step, repository)).run(None, {"x": y})
        yield y
        return
    session = inprocess.session(_model_file(_of_endpoint(case) if case.versions else case, repository))
    state = np.zeros((1, WIDTH), np.float32)
    for _ in range(_CHECKED_STEPS if case.steps else 1):
        y, *states = session.run(None, {"x": _EXAMPLE, **({"s": state} if case.steps else {})})
        state = states[0] if states else state
        yield y


def _parameters(case: Case, step: int) -> dict[str, int | bool]:
    """Returns the parameters of a step that is checked; step 0 is a sequence of its own."""
    if not case.steps:
        return {}
    start, end = step in (0, 1), step in (0, _CHECKED_STEPS)
    return {"sequence_id": FIRST_ID - 1, "sequence_start": start, "sequence_end": end}


def _calls(launch: servers.Launch, case: Case, encoding: str, reply_bytes: int) -> Calls:
    return Calls(
        host="127.0.0.1",
        port=launch.grpc_port if encoding == GRPC else launch.port,
        model=case.name,
        encoding=encoding,
        callers=case.callers,
        example=_EXAMPLE[0].tolist(),
        steps=case.steps,
        responses=case.responses,
        reply_bytes=reply_bytes,
    )


def _address(launch: servers.Launch, case: Case, encoding: str) -> str:
    if encoding == GRPC:
        return f"http://127.0.0.1:{launch.grpc_port}"
    return f"http://127.0.0.1:{launch.port}/v2/models/{case.name}/infer"

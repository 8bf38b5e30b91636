"""`sequence_batching` as it is read and refused, and what a request of a sequence must be (reference §3.4)."""

from dataclasses import replace

import msgspec
import pytest

from qinfer.core.messages import InferRequest, SequenceFlags
from qinfer.errors import InvalidRequest, ModelLoadFailed
from qinfer.models.config.check import REFUSED, check
from qinfer.models.config.config import ModelConfig, normalise, parse, to_spec
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.config.sequences import fill_sequence_defaults, sequence_problems, to_sequence_spec
from qinfer.models.sequence_spec import (
    ControlKind,
    ControlSpec,
    DirectSpec,
    OldestSpec,
    SequenceSpec,
    StateSpec,
    check_sequence,
)
from qinfer.models.spec import ModelSpec
from qinfer.queue.sequences.records import start_missing
from qinfer.tensors import Tensor

IO = """
    input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
STATE = 'input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: [ 2, -1 ]'
INITIAL = 'name: "i" data_type: TYPE_FP32 dims: [ 2, 3 ]'
START = "kind: CONTROL_SEQUENCE_START"
CORRID = "kind: CONTROL_SEQUENCE_CORRID"


def config(batching: str, max_batch_size: int = 4) -> ModelConfig:
    """Returns the configuration of a model that has this `sequence_batching`."""
    return parse(f'name: "m" max_batch_size: {max_batch_size} sequence_batching {{ {batching} }}')


def read(batching: str, max_batch_size: int = 4) -> SequenceSpec:
    """Returns what is read of it."""
    spec = to_sequence_spec(config(batching, max_batch_size))
    assert spec is not None
    return spec


def control(kind: str, name: str = "c") -> str:
    """Returns a control input of one control."""
    return f'control_input {{ name: "{name}" control {{ {kind} }} }}'


def test_a_model_without_sequences_has_no_spec() -> None:
    plain = parse('name: "m"')

    fill_sequence_defaults(plain)

    assert to_sequence_spec(plain) is None
    assert not plain.HasField("sequence_batching")


@pytest.mark.parametrize(
    ("batching", "max_batch_size", "spec"),
    [
        ("", 4, SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, max_idle_s=1.0)),
        ("direct {}", 0, SequenceSpec(strategy=DirectSpec(), slots=1, max_rows=1)),
        ("oldest {}", 4, SequenceSpec(strategy=OldestSpec(preferred_sizes=(4,)), slots=4, max_rows=4)),
        (
            "oldest { max_candidate_sequences: -1 }",
            0,
            SequenceSpec(strategy=OldestSpec(preferred_sizes=(1,)), slots=1, max_rows=1),
        ),
        (
            "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 3, 2, 3 ] max_queue_delay_microseconds: 500 "
            "preserve_ordering: true } max_sequence_idle_microseconds: 2500000 iterative_sequence: true",
            4,
            SequenceSpec(
                strategy=OldestSpec(preferred_sizes=(2, 3), max_queue_delay_s=0.0005, preserve_ordering=True),
                slots=9,
                max_rows=4,
                max_idle_s=2.5,
                iterative=True,
            ),
        ),
    ],
)
def test_the_strategies_and_their_defaults(batching: str, max_batch_size: int, spec: SequenceSpec) -> None:
    assert read(batching, max_batch_size) == spec


@pytest.mark.parametrize(
    ("utilization", "rows"), [("0", 0), ("0.01", 1), ("0.2", 1), ("0.8", 4), ("0.80001", 5), ("0.6", 3), ("1", 5)]
)
def test_a_share_of_the_slots_is_a_number_of_rows(utilization: str, rows: int) -> None:
    """0.8 in single precision is more than 0.8 in double precision, and 4 of 5 slots are enough all the same."""
    spec = read(f"direct {{ minimum_slot_utilization: {utilization} max_queue_delay_microseconds: 7 }}", 5)

    assert spec.strategy == DirectSpec(minimum_rows=rows, max_queue_delay_s=7e-6)


def test_a_configuration_is_shown_with_its_defaults() -> None:
    shown = config("oldest {}")

    fill_sequence_defaults(shown)

    assert shown.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(shown.sequence_batching.oldest.preferred_batch_size) == [4]


def test_control_inputs_of_each_kind_and_type() -> None:
    spec = read(
        control(f"{START} int32_false_true: [ 3, 4 ]", "s")
        + control("kind: CONTROL_SEQUENCE_END fp32_false_true: [ -0.5, 1.5 ]", "e")
        + control("kind: CONTROL_SEQUENCE_READY bool_false_true: [ true, false ]", "r")
        + control(f"{CORRID} data_type: TYPE_STRING", "id")
    )

    assert spec.controls == (
        ControlSpec(name="s", kind=ControlKind.START, datatype="INT32", false=3, true=4),
        ControlSpec(name="e", kind=ControlKind.END, datatype="FP32", false=-0.5, true=1.5),
        ControlSpec(name="r", kind=ControlKind.READY, datatype="BOOL", false=True, true=False),
        ControlSpec(name="id", kind=ControlKind.CORRID, datatype="BYTES"),
    )
    assert spec.control(ControlKind.END) == spec.controls[1]
    assert read("").control(ControlKind.END) is None


def test_states_begin_with_zeros_or_a_file() -> None:
    spec = read(
        f"state {{ {STATE} use_same_buffer_for_input_output: true use_growable_memory: true }}"
        f'state {{ input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: [ -1, 3 ] '
        f'initial_state {{ {INITIAL} data_file: "f" }} }}'
    )

    assert spec.states == (
        StateSpec(
            input="si", output="so", datatype="FP32", dims=(2, -1), initial_dims=(2, 1), same_buffer=True, growable=True
        ),
        StateSpec(input="a", output="b", datatype="FP32", dims=(-1, 3), initial_dims=(2, 3), file="f"),
    )


def refusals(batching: str) -> list[str]:
    """Returns what is wrong with a configuration, and checks that it is refused for it."""
    wrong = config(batching)
    with pytest.raises(ModelLoadFailed, match="model 'm': "):
        to_sequence_spec(wrong)
    return list(sequence_problems(wrong))


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        ("oldest { preferred_batch_size: 0 }", "preferred batch size must be positive for m, got 0"),
        ("oldest { preferred_batch_size: 5 }", "preferred batch size must be <= max batch size for m, got 5 > 4"),
        *(
            (
                f"direct {{ minimum_slot_utilization: {share} }}",
                f"minimum slot utilization must be in range (0.0, 1.0] for m, got {float(share)}",
            )
            for share in ("1.5", "-1", "nan")
        ),
    ],
)
def test_a_wrong_strategy_is_refused_in_tritons_words(batching: str, text: str) -> None:
    assert refusals(batching) == [f"sequence batching {text}"]


INT32 = "int32_false_true: [ 0, 1 ]"
BOTH = "'int32_false_true', 'fp32_false_true'"


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        (control(f"{START} {INT32}", ""), "sequence batching control tensor must have a name for m"),
        ('control_input { name: "c" }', "sequence batching control tensor 'c' must specify a control for m"),
        (
            control(f"{START} {INT32}") + control(f"{CORRID} data_type: TYPE_UINT64"),
            "sequence batching control tensor 'c' is specified for multiple control kinds for m",
        ),
        (
            control(f"{START} {INT32} }} control {{ {CORRID} data_type: TYPE_UINT64"),
            "sequence batching control tensor 'c' is specified for multiple control kinds for m",
        ),
        (
            control(f"{START} {INT32}") + control(f"{START} {INT32}", "d"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            control(START),
            f"sequence batching must specify either {BOTH} or 'bool_false_true' for CONTROL_SEQUENCE_START for m",
        ),
        (
            control(f"{START} {INT32} fp32_false_true: [ 0, 1 ]"),
            f"sequence batching specifies more than one from {BOTH} and 'bool_false_true' for CONTROL_SEQUENCE_START "
            "for m",
        ),
        (
            control(f"{START} bool_false_true: [ true ]"),
            "sequence batching control 'bool_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            control(f"{CORRID} data_type: TYPE_UINT64 {INT32}"),
            f"sequence batching must not specify either {BOTH} or 'bool_false_true' for CONTROL_SEQUENCE_CORRID for m",
        ),
        *(
            (
                control(f"{CORRID} {datatype}"),
                "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
                "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            )
            for datatype in ("", "data_type: TYPE_FP32")
        ),
    ],
)
def test_a_wrong_control_is_refused_in_tritons_words(batching: str, text: str) -> None:
    assert refusals(batching) == [text]


TWICE = "specified more than once."


@pytest.mark.parametrize(
    ("batching", "texts"),
    [
        (
            f"state {{ {STATE} }} state {{ {STATE} }}",
            [f"State input name 'si' {TWICE}", f"State output name 'so' {TWICE}"],
        ),
        (f"state {{ {STATE} }}" + control(f"{START} {INT32}", "si"), [f"State input name 'si' {TWICE}"]),
        (
            'state { output_name: "so" data_type: TYPE_FP32 dims: [ 1 ] }',
            ["model state '' must specify 'input_name' and 'output_name'"],
        ),
        (
            'state { input_name: "si" output_name: "so" }',
            ["model state 'si' must specify 'data_type'", "model state 'si' must specify 'dims'"],
        ),
        (
            'state { input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: [ 0 ] }',
            [
                "model state 'si' dimension must be integer >= 1, or -1 to indicate a variable-size dimension, got [0]",
            ],
        ),
        (
            'state { input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: [ 70000, 70000 ] }',
            ["model state 'si' has 19600000000 bytes in its first step; 67108864 is the limit"],
        ),
        (
            f"state {{ {STATE} initial_state {{ {INITIAL} zero_data: true }} initial_state {{ }} }}",
            [
                "initial_state field for state input 'si' must contain exactly one or zero element. "
                "Found '2' elements.",
            ],
        ),
    ],
)
def test_a_wrong_state_is_refused_in_tritons_words(batching: str, texts: list[str]) -> None:
    assert refusals(batching) == texts


FP32 = 'name: "i" data_type: TYPE_FP32'


@pytest.mark.parametrize(
    ("initial", "text"),
    [
        (
            'name: "i" data_type: TYPE_INT32 dims: [ 2, 3 ] zero_data: true',
            "The data type used for 'initial_state' field of state 'si' does not match the state data type.",
        ),
        (
            "data_type: TYPE_FP32 dims: [ 2, 3 ] zero_data: true",
            "Field 'name' must be set when using initial_state for state input 'si'.",
        ),
        (
            f"{FP32} dims: [ 2 ] zero_data: true",
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            "'si'. 1 != 2",
        ),
        (
            f"{FP32} dims: [ 2, -1 ] zero_data: true",
            "'initial_state' field for state input name 'si' contains variable dimensions.",
        ),
        (
            f"{FP32} dims: [ 4, 1 ] zero_data: true",
            "'initial_state' dim for input name 'si' doesn't match 'state' dim description. 4 != 2",
        ),
        (INITIAL, "initial_state setting expects state'si' to have state_data set"),
    ],
)
def test_a_wrong_initial_state_is_refused_in_tritons_words(initial: str, text: str) -> None:
    assert refusals(f"state {{ {STATE} initial_state {{ {initial} }} }}") == [text]


def test_the_file_of_a_state_lies_within_the_models_directory() -> None:
    wrong = config(f'state {{ {STATE} initial_state {{ {INITIAL} data_file: "../x" }} }}')

    with pytest.raises(ModelLoadFailed) as refused:
        check(wrong)

    assert (
        "data_file of the initial_state of state 'si' must be a path within the model's directory, without '..', "
        "got '../x'"
    ) in refused.value.message


def test_a_first_state_of_zeros() -> None:
    spec = StateSpec(input="s", output="t", datatype="FP32", dims=(-1, 2), initial_dims=(1, 2))
    text = StateSpec(input="s", output="t", datatype="BYTES", dims=(2,), initial_dims=(2,))

    assert spec.initial(None, batched=True) == Tensor("s", "FP32", (1, 1, 2), bytes(8))
    assert text.initial(None, batched=False) == Tensor("s", "BYTES", (2,), bytes(8))


def test_a_first_state_of_a_file() -> None:
    """Bytes that the file has beyond the state are passed over, as by Triton."""
    spec = StateSpec(input="s", output="t", datatype="INT32", dims=(2,), initial_dims=(2,), file="f")
    text = StateSpec(input="s", output="t", datatype="BYTES", dims=(1,), initial_dims=(1,), file="f")

    assert spec.initial(b"12345678rest", batched=True).data == b"12345678"
    assert text.initial(b"\2\0\0\0hi", batched=True).data == b"\2\0\0\0hi"
    with pytest.raises(ModelLoadFailed, match="expects 8 bytes, but the data provided from f only has 7 bytes"):
        spec.initial(b"1234567", batched=True)


SPEC = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4)
NUMBERED = SequenceSpec(
    strategy=DirectSpec(),
    slots=4,
    max_rows=4,
    controls=(ControlSpec(name="c", kind=ControlKind.CORRID, datatype="INT32"),),
)
TEXTUAL = replace(NUMBERED, controls=(replace(NUMBERED.controls[0], datatype="BYTES"),))
ITERATIVE = SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, iterative=True)


@pytest.mark.parametrize(
    ("sequence", "rows", "spec", "text"),
    [
        (
            SequenceFlags(1),
            2,
            SPEC,
            "to model 'm' must specify batch-size 1 due to requirements of sequence batcher",
        ),
        (None, 1, SPEC, "to model 'm' must specify a non-zero or non-empty correlation ID"),
        (SequenceFlags(0), 1, SPEC, "to model 'm' must specify a non-zero or non-empty correlation ID"),
        (SequenceFlags(""), 1, SPEC, "to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            SequenceFlags("ü" * 65),
            1,
            SPEC,
            "to model 'm' has a correlation ID of 130 bytes; text may have 128",
        ),
        (
            SequenceFlags("a"),
            1,
            NUMBERED,
            "sequence batching control 'c' data-type is 'BYTES', but model 'm' expects 'INT32'",
        ),
        (
            SequenceFlags(7),
            1,
            TEXTUAL,
            "sequence batching control 'c' data-type is 'UINT64', but model 'm' expects 'BYTES'",
        ),
        (
            SequenceFlags(1),
            2,
            ITERATIVE,
            "to model 'm' must specify batch-size 1 due to requirements of sequence batcher",
        ),
    ],
)
def test_a_request_that_no_sequence_can_have(
    sequence: SequenceFlags | None, rows: int, spec: SequenceSpec, text: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_sequence(InferRequest(model="m", inputs=(), sequence=sequence), rows, spec)

    assert refused.value.message.removeprefix("inference request ") == text


def test_an_id_of_the_other_kind_is_refused_as_an_input_is() -> None:
    """Triton's text of it begins with the request's id, and those of its sequence batcher do not."""
    with pytest.raises(InvalidRequest) as refused:
        check_sequence(InferRequest(model="m", inputs=(), sequence=SequenceFlags("a")), 1, NUMBERED)

    assert type(refused.value) is InvalidRequest


@pytest.mark.parametrize(
    ("sequence", "spec"),
    [
        (SequenceFlags(7, start=True), NUMBERED),
        (SequenceFlags("a"), TEXTUAL),
        (SequenceFlags("é" * 64), SPEC),
        (None, ITERATIVE),
        (SequenceFlags(7), ITERATIVE),
    ],
)
def test_a_good_request_of_a_sequence(sequence: SequenceFlags | None, spec: SequenceSpec) -> None:
    assert check_sequence(InferRequest(model="m", inputs=(), sequence=sequence), 1, spec) == sequence


def test_a_request_without_start_is_told_so_in_tritons_words() -> None:
    assert start_missing("m", 7).message == (
        "inference request for sequence 7 to model 'm' must specify the START flag on the first request of the sequence"
    )


@pytest.fixture
def _offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets configurations have sequences, which workers do not run yet."""
    others = {path: why for path, why in REFUSED.items() if path != "sequence_batching"}
    monkeypatch.setattr("qinfer.models.config.check.REFUSED", others)


STATEFUL = f"""
    backend: "onnxruntime" max_batch_size: 4
    sequence_batching {{
        oldest {{ }}
        {control(f"{START} int32_false_true: [ 0, 1 ]", "start")}
        state {{ input_name: "si" output_name: "so" data_type: TYPE_FP32 dims: [ 2 ] }}
    }}
"""


def file_of(*inputs: str) -> FileTensors:
    """Returns what a model file with these inputs declares."""
    return FileTensors(
        inputs=tuple(FileTensor(name=name, datatype="FP32", dims=(-1, 2)) for name in inputs),
        outputs=tuple(FileTensor(name=name, datatype="FP32", dims=(-1, 2)) for name in ("y", "so")),
    )


@pytest.mark.usefixtures("_offered")
def test_controls_and_states_are_no_inputs_and_outputs_of_requests() -> None:
    """Clients see and send what is left; the model file has all of them."""
    normal = normalise(parse(STATEFUL), "m", ["model.onnx"], file_of("x", "start", "si"))

    spec = to_spec(normal)

    assert [tensor.name for tensor in (*spec.inputs, *spec.outputs)] == ["x", "y"]
    assert normal.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert spec.sequences == to_sequence_spec(normal)
    assert spec.batching is None
    assert spec.is_stateful


@pytest.mark.usefixtures("_offered")
def test_a_state_may_be_answered_as_well() -> None:
    """Where the configuration lists it as an output, as Triton has it for debugging."""
    tensor = "data_type: TYPE_FP32 dims: [ 2 ]"
    text = STATEFUL + f'input {{ name: "x" {tensor} }} output {{ name: "so" {tensor} }}'

    spec = to_spec(normalise(parse(text), "m", ["model.onnx"], file_of("x", "start", "si")))

    assert [tensor.name for tensor in spec.outputs] == ["so"]


@pytest.mark.usefixtures("_offered")
@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('input { name: "x"', 'input { name: "si"', "input 'si' is a control or state"),
        ('input { name: "x"', 'input { name: "start"', "input 'start' is a control or state"),
        ("output {", "model_transaction_policy { decoupled: true } output {", "'model_transaction_policy.decoupled'"),
        ("onnxruntime", "python", "'sequence_batching.state' is not supported by backend 'python'"),
        ("oldest {", "oldest { preferred_batch_size: 9", "preferred batch size must be <= max batch size"),
    ],
)
def test_what_contradicts_sequences_is_refused_when_a_model_is_loaded(old: str, new: str, text: str) -> None:
    with pytest.raises(ModelLoadFailed, match=text):
        normalise(parse((STATEFUL + IO).replace(old, new)), "m", ["model.onnx"])


@pytest.mark.parametrize(
    "batching", ["direct {}", f"oldest {{}} state {{ {STATE} }}", control(f"{CORRID} data_type: TYPE_STRING")]
)
def test_a_specification_goes_to_other_processes(batching: str) -> None:
    """Examiners get those of models."""
    spec = read(batching)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SequenceSpec) == spec


def test_only_models_that_are_not_iterated_keep_state_between_requests() -> None:
    plain, iterative = ModelSpec(name="m", backend="b", inputs=(), outputs=()), read("iterative_sequence: true")

    assert not plain.is_stateful
    assert not replace(plain, sequences=iterative).is_stateful
    assert replace(plain, sequences=read("")).is_stateful

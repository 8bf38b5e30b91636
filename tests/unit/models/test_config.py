"""`config.pbtxt`: parsing, defaults, what is refused, and what becomes of it."""

import json
import subprocess
import sys

import pytest

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import ModelConfig, complete, from_json, normalise, parse, to_json, to_spec
from qinfer.models.config.file_tensors import FileTensor, FileTensors
from qinfer.models.spec import BatchingSpec, QueuePolicy, ResourceSpec, TensorSpec, WarmupInput, WarmupSpec

LIMITS = LimitSettings()
IO = """
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
ONNX = 'backend: "onnxruntime"' + IO
WARMUP = """
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 4 %s } } }
"""


def normal(text: str) -> ModelConfig:
    return normalise(parse(text), "m")


def file_tensors(x: tuple[int, ...] = (-1, 4), y: tuple[int, ...] = (-1, 2)) -> FileTensors:
    return FileTensors(
        inputs=(FileTensor(name="x", datatype="FP32", dims=x),),
        outputs=(FileTensor(name="y", datatype="FP32", dims=y),),
    )


def test_a_parse_error_names_the_line() -> None:
    """An unknown field is refused with its place in the file."""
    with pytest.raises(ModelLoadFailed, match=r'^config.pbtxt, line 2, column 1: .*"max_batch_sizze"'):
        parse('name: "m"\nmax_batch_sizze: 3\n')


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("max_batchsize: 4", "line 1, column 1: .*; did you mean 'max_batch_size'"),
        ("\nmaxBatchSize: 4", "line 2, column 1: .*; did you mean 'max_batch_size'"),
        ("input { name: 'x' data_type: FP32 }", "line 1, .*; did you mean 'TYPE_FP32'"),
        ("input { name: 'x' data_type: TYPE_FLOAT }", "did you mean 'TYPE_FP32'"),
        ("input { name: 'x' data_type: type_bytes }", "did you mean 'TYPE_STRING'"),
        ("input { name: 'x' data_type: TYPE_FP23 }", "did you mean 'TYPE_FP32'"),
        ("input { name: 'x' datatype: TYPE_FP32 }", "did you mean 'data_type'"),
        ("instance_group { kind: GPU }", "did you mean 'KIND_GPU'"),
        ("dynamic_batching { default_queue_policy { timeout_action: DELAYS } }", "did you mean 'DELAY'"),
        ("dynamic_batching { max_queue_delay: 5 }", "did you mean 'max_queue_delay_microseconds'"),
        ("parameters { key: 'a' value { stringvalue: 'x' } }", "did you mean 'string_value'"),
        ("preferred_batch_size: 4", "it is a field of 'dynamic_batching'"),
        ("model_transaction_policy { stream: true }", "it has decoupled"),
    ],
)
def test_a_name_that_does_not_exist_gets_the_one_that_was_meant(text: str, hint: str) -> None:
    with pytest.raises(ModelLoadFailed, match=hint):
        parse(text)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"max_batchsize": 4}', "did you mean 'max_batch_size'"),
        ('{"maxBatchsize": 4}', "did you mean 'max_batch_size'"),
        ('{"input": [{"name": "x", "data_type": "FP32"}]}', r"ModelConfig.input\[0\].data_type; did you .*'TYPE_FP32'"),
        ('{"model_warmup": [{"inputs": {"x": {"data_type": "INT"}}}]}', "did you mean 'TYPE_INT32'"),
        ('{"parameters": {"a": {"stringvalue": "x"}}}', r"ModelConfig.parameters\[a\]\"; did you mean 'string_value'"),
        ('{"sequence_batching": {"control_input": [{"control": [{"kind": "START"}]}]}}', "'CONTROL_SEQUENCE_START'"),
    ],
)
def test_an_override_gets_the_same_hints(text: str, hint: str) -> None:
    with pytest.raises(ModelLoadFailed, match=hint):
        from_json(text)


def test_defaults_are_tritons() -> None:
    """What is left out is filled as Triton shows it in GET …/config."""
    config = normal(ONNX + "max_batch_size: 8\ndynamic_batching { }")

    assert config.name == "m"
    assert config.platform == "onnxruntime_onnx"
    assert config.default_model_filename == "model.onnx"
    assert config.version_policy.latest.num_versions == 1
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.optimization.input_pinned_memory.enable
    assert [(g.name, g.count) for g in config.instance_group] == [("m", 2)]


def test_the_callers_config_is_left_alone() -> None:
    """`normalise` works on a copy."""
    config = parse(ONNX)

    normalise(config, "m")

    assert config == parse(ONNX)


@pytest.mark.parametrize(
    ("file", "backend", "platform"),
    [
        ("model.onnx", "onnxruntime", "onnxruntime_onnx"),
        ("model.plan", "tensorrt", "tensorrt_plan"),
        ("model.pt", "pytorch", "pytorch_libtorch"),
        ("model.py", "python", ""),
    ],
)
def test_the_backend_is_deduced_from_the_files(file: str, backend: str, platform: str) -> None:
    """A configuration without backend and platform gets both from the model file's name."""
    config = normalise(parse(IO), "m", ["notes.txt", file])

    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, file)


def test_a_platform_tells_the_backend() -> None:
    """The older way of naming a backend still works."""
    assert normal('platform: "onnxruntime_onnx"' + IO).backend == "onnxruntime"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "other"' + ONNX, "unexpected directory name 'm' for model 'other', directory name must equal"),
        (IO, "must specify 'platform' or 'backend' for m"),
        ('platform: "caffe2_netdef"' + IO, "unexpected platform type 'caffe2_netdef' for m"),
        ('platform: "tensorrt_plan"' + ONNX, "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxr"),
        (ONNX + "max_batch_size: -1", "'max_batch_size' must be non-negative"),
        (ONNX + "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "must be <= max batch size for m"),
        (ONNX + "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }", "must be positive for m"),
        (ONNX + 'input { name: "x" data_type: TYPE_FP32 dims: 1 }', "input 'x' is configured more than once"),
        (ONNX + "input { data_type: TYPE_FP32 dims: 1 }", "model input must specify 'name'"),
        (ONNX + 'input { name: "z" dims: 1 }', "model input 'z' must specify 'data_type'"),
        (ONNX + 'input { name: "z" data_type: 99 dims: 1 }', "'m': input.data_type is 99, which has no meaning"),
        (ONNX + "instance_group { kind: 9 }", "instance_group.kind is 9, which has no meaning; it has KIND_AUTO"),
        (ONNX + WARMUP.replace("TYPE_FP32", "77") % "", "model_warmup.inputs.data_type is 77"),
        (ONNX + 'output { name: "z" data_type: TYPE_FP32 }', "model output 'z' must specify 'dims'"),
        (ONNX + 'input { name: "z" data_type: TYPE_FP32 dims: 0 }', "dimension must be integer >= 1, or -1"),
        *(
            (ONNX + f'input {{ name: "z" data_type: TYPE_FP32 dims: {dims} reshape {{ shape: {shape} }} }}', text)
            for dims, shape, text in (
                ("4", "3", "different size for dims and"),
                ("[ -1, 4 ]", "[ 4, -1 ]", "different size for dims and"),
                ("[ -1, 4 ]", "[ -1, -1 ]", "different size for dims and"),
                ("[ 2, -1, 6 ]", "[ 6, -1, 2 ]", "different size for dims and"),
                ("4", "[ 4, 0 ]", "reshape dimensions must be integer >= 1, or -1 to indicate a variable-size"),
            )
        ),
        (ONNX + "instance_group { count: -1 }", "must specify 'count' >= 1"),
        (ONNX + "instance_group { kind: KIND_CPU gpus: 0 }", "has kind KIND_CPU but specifies one or more GPUs"),
        (ONNX + "instance_group { kind: KIND_GPU }", "has kind KIND_GPU but no GPUs are available"),
        (ONNX + "instance_group { gpus: [ 1, 1 ] }", r"must name different GPUs by their numbers from 0, got \[1, 1\]"),
        (ONNX + "instance_group { gpus: -1 }", "must name different GPUs by their numbers from 0"),
        (ONNX + "instance_group { count: 2000000000 }", "<= 1024, got 2000000000"),
        ('backend: "pytorch"', "the configuration has no 'input', and only a PyTorch file of torch.export declares it"),
        (ONNX + 'default_model_filename: "../model.onnx"', "default_model_filename must be a path within the"),
        (ONNX + "version_policy { specific { } }", "'version_policy.specific' must list at least one version"),
        (ONNX + 'model_warmup { name: "w" batch_size: 2 }', "model warmup 'w' has batch_size 2"),
        (ONNX + 'model_warmup { name: "w" batch_size: 1 }', r"model warmup 'w' lacks input\(s\) x"),
        (ONNX + WARMUP % "", "model warmup 'w' must give input 'x' zero_data, random_data or an input_data_file"),
        (ONNX + WARMUP % "zero_data: true dims: 5", r"fixed dims that the model takes, \[4\], got \[4, 5\]"),
        (ONNX + WARMUP.replace("FP32", "FP16") % "zero_data: true", "'x' the model's data_type, FP32"),
        (ONNX + WARMUP.replace('"x"', '"z"') % "zero_data: true", "has input 'z', which the model does not have"),
        (ONNX + 'metric_tags { key: "a-b" value: "c" }', "metric tag 'a-b' is no name of a label"),
        (ONNX + 'parameters { key: "qinfer.speed" value { string_value: "1" } }', "unknown parameter 'qinfer.speed'"),
        (ONNX + 'parameters { key: "qinfer.max_timeout_s" value { string_value: "no" } }', "must be a positive number"),
        (ONNX + 'parameters { key: "qinfer.lane_capacity" value { string_value: "0" } }', "must be an integer above 0"),
        (
            ONNX + 'parameters { key: "qinfer.min_workers" value { string_value: "-1" } }',
            "an integer of 0 or more, got",
        ),
        (
            ONNX + 'parameters { key: "qinfer.binary_outputs" value { string_value: "a,,b" } }',
            "must be names of outputs, with commas between, got 'a,,b'",
        ),
        (
            ONNX + 'parameters { key: "qinfer.stream_resume" value { string_value: "yes" } }',
            "'qinfer.stream_resume' must be 'skip', got 'yes'",
        ),
        (
            ONNX + 'parameters { key: "qinfer.stream_resume" value { string_value: "skip" } }',
            "'qinfer.stream_resume' is for decoupled models",
        ),
        (ONNX + "dynamic_batching { priority_levels: 2 }", r"default priority level must be in range \[1, 2\] for m"),
        (
            ONNX + "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            r"default priority level must be in range \[1, 2\] for m, got 3",
        ),
        (
            ONNX + "dynamic_batching { priority_levels: 1 default_priority_level: 1 priority_queue_policy { key: 2 } }",
            r"priority queue policy must have priority level in range \[1, 1\] for m, got 2",
        ),
        (
            ONNX + "dynamic_batching { priority_levels: 2 default_priority_level: 1 preserve_ordering: true }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            ONNX
            + "dynamic_batching { preserve_ordering: true default_queue_policy "
            + "{ timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
    ],
)
def test_mistakes_are_refused(text: str, message: str) -> None:
    """A wrong configuration is refused with Triton's text where it has one."""
    with pytest.raises(ModelLoadFailed, match=message):
        normal(text)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('ensemble_scheduling { step { model_namespace: "n" } }', "ensemble_scheduling.step.model_namespace"),
        ('runtime: "x"', "runtime"),
        ('model_operations { op_library_filename: "x.so" }', "model_operations.op_library_filename"),
        ('model_repository_agents { agents { name: "checksum" } }', "model_repository_agents.agents"),
        ("output { is_shape_tensor: true }", "output.is_shape_tensor"),
        ('instance_group { profile: "1" }', "instance_group.profile"),
        ('cc_model_filenames { key: "8.0" value: "a.onnx" }', "cc_model_filenames"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(text: str, setting: str) -> None:
    """A setting that a client would miss is never ignored."""
    with pytest.raises(ModelLoadFailed, match=f"'{setting}' is not supported by this server"):
        normal(ONNX + text)


@pytest.mark.parametrize(
    "text",
    [
        "optimization { graph { level: 1 } priority: PRIORITY_MAX cuda { graphs: true } }",
        'instance_group { kind: KIND_CPU count: 2 rate_limiter { } host_policy: "numa0" }',
        "max_batch_size: 2 dynamic_batching { preserve_ordering: true }",
        "response_cache { enable: false } model_transaction_policy { decoupled: false }",
    ],
)
def test_hints_are_accepted(text: str) -> None:
    """What changes speed only, or says what is so anyway, is no reason to refuse a model."""
    assert normal(ONNX + text).name == "m"


def test_the_resources_of_instances_are_read() -> None:
    """As in Triton, the last one of a name counts."""
    named = (
        "rate_limiter { resources { name: 'r' count: 2 } resources { name: 'r' count: 3 global: true } priority: 4 }"
    )

    spec = to_spec(normal(f"{ONNX} instance_group {{ {named} }} instance_group {{ kind: KIND_CPU }}"))

    assert [(group.resources, group.priority) for group in spec.instances] == [
        ((ResourceSpec("r", 3, True),), 4),
        ((), 0),
    ]
    assert spec.is_limited


def test_a_warm_up_sample_without_a_batch_size_is_not_executed() -> None:
    """As in Triton; nor is it checked."""
    config = normal(ONNX + 'model_warmup { name: "w" inputs { key: "z" value { } } }')

    assert to_spec(config).warmup == ()


def test_a_warm_up_sample_may_give_what_the_server_fills() -> None:
    """Control inputs and states, checked as inputs are."""
    batching = """sequence_batching {
        control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
        state { input_name: "si" output_name: "so" data_type: TYPE_INT64 dims: -1 }
    }"""
    start = 'inputs { key: "START" value { data_type: TYPE_%s dims: 1 random_data: true } }'
    state = 'inputs { key: "si" value { data_type: TYPE_INT64 dims: 7 zero_data: true } }'
    text = f"{ONNX} {batching} {WARMUP % 'zero_data: true'}".rstrip("}\n ") + f" }} }} {start} {state} }}"

    spec = to_spec(normal(text % "INT32"))

    assert sorted(spec.warmup[0].inputs) == ["START", "si", "x"]
    with pytest.raises(ModelLoadFailed, match="must give input 'START' the model's data_type, INT32"):
        normal(text % "FP32")


def test_decoupled_models_are_accepted() -> None:
    config = normal(
        ONNX
        + "model_transaction_policy { decoupled: true }"
        + 'parameters { key: "qinfer.stream_resume" value { string_value: "skip" } }'
    )

    assert to_spec(config).decoupled
    assert to_spec(config).stream_resume
    assert not to_spec(normal(ONNX)).decoupled


def test_json_is_tritons_dialect() -> None:
    """Names stay snake_case, 64-bit integers are numbers, defaults are printed, absent messages are not."""
    config = normal(
        ONNX
        + 'max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 100 } metric_tags { key: "a" value: "b" }'
    )

    shown = json.loads(to_json(config))

    assert shown["input"][0]["dims"] == [4]
    assert shown["input"][0]["data_type"] == "TYPE_FP32"
    assert shown["input"][0]["optional"] is False
    assert shown["dynamic_batching"]["max_queue_delay_microseconds"] == 100
    assert shown["metric_tags"] == {"a": "b"}
    assert shown["model_warmup"] == []
    assert "sequence_batching" not in shown
    assert "reshape" not in shown["input"][0]


def test_json_also_takes_integers_as_strings() -> None:
    """The stock client example overrides max_batch_size with "16" (reference §1.14)."""
    assert from_json('{"max_batch_size": "16"}').max_batch_size == 16


@pytest.mark.parametrize("name", ["instance_group", "instanceGroup"])
def test_an_object_stands_for_a_list_of_one(name: str) -> None:
    """Triton's parser takes it so."""
    assert [group.count for group in from_json(f'{{"{name}": {{"count": 2}}}}').instance_group] == [2]


def test_broken_json_is_refused() -> None:
    """Text that is no configuration raises the error of a failed load."""
    with pytest.raises(ModelLoadFailed, match="not valid JSON"):
        from_json('{"max_batch": 1}')


def test_a_spec_has_what_the_config_says() -> None:
    """Everything that gateways and workers read arrives in the spec."""
    spec = to_spec(
        normal(
            """
            backend: "onnxruntime" max_batch_size: 8
            input { name: "x" data_type: TYPE_STRING dims: [ -1 ] optional: true }
            output { name: "y" data_type: TYPE_INT64 dims: 1 reshape { } }
            dynamic_batching { preferred_batch_size: [ 8, 4 ] max_queue_delay_microseconds: 1500 }
            instance_group [ { count: 2 }, { count: 1 } ]
            optimization { graph { level: -1 } }
            parameters { key: "qinfer.default_timeout_s" value { string_value: "2.5" } }
            parameters { key: "intra_op_thread_count" value { string_value: "1" } }
            model_warmup { name: "w" batch_size: 2
              inputs { key: "x" value { data_type: TYPE_STRING dims: 3 random_data: true } } }
            """
        ),
        LIMITS,
    )

    assert spec.inputs == (TensorSpec(name="x", datatype="BYTES", dims=(-1,), optional=True),)
    assert spec.outputs == (TensorSpec(name="y", datatype="INT64", dims=(1,), reshape=()),)
    assert spec.batching == BatchingSpec(preferred_sizes=(4, 8), max_queue_delay_s=0.0015)
    assert (spec.instance_count, spec.graph_level, spec.filename) == (3, -1, "model.onnx")
    assert (spec.default_timeout_s, spec.max_timeout_s) == (2.5, LIMITS.max_timeout_s)
    assert spec.parameters["intra_op_thread_count"] == "1"
    assert spec.warmup == (WarmupSpec(name="w", batch_size=2, inputs={"x": WarmupInput("BYTES", (3,), random=True)}),)


QUEUES = """
dynamic_batching {
  priority_levels: 3 default_priority_level: 2
  default_queue_policy { max_queue_size: 7 default_timeout_microseconds: 250000 allow_timeout_override: true }
  priority_queue_policy { key: 3 value { timeout_action: DELAY default_timeout_microseconds: 1000000 } }
  priority_queue_policy { key: 1 value { timeout_action: DELAY } }
}
"""


def test_priorities_and_queue_policies() -> None:
    """Levels, their policies, and what a request's level becomes; an action without a timeout means nothing."""
    batching = to_spec(normal(ONNX + "max_batch_size: 8" + QUEUES), LIMITS).batching

    assert batching is not None
    assert [batching.level(asked) for asked in (0, 1, 3, 4, 2**64 - 1)] == [2, 1, 3, 2, 2]
    assert batching.policy(1) == QueuePolicy()
    assert batching.policy(2) == QueuePolicy(max_queue_size=7, timeout_s=0.25, allow_override=True)
    assert batching.policy(3) == QueuePolicy(timeout_s=1.0, delay=True)
    assert not batching.is_plain
    assert not batching.may_prefetch


def test_priorities_need_no_batch_dimension() -> None:
    """Requests of a model that can't be batched wait by the same rules."""
    batching = to_spec(normal(ONNX + QUEUES), LIMITS).batching

    assert batching is not None
    assert batching.priority_levels == 3


def test_policies_of_levels_without_levels_mean_nothing() -> None:
    """As in Triton, they are not looked at."""
    text = "max_batch_size: 8 dynamic_batching { priority_queue_policy { key: 1 value { max_queue_size: 3 } } }"

    batching = to_spec(normal(ONNX + text), LIMITS).batching

    assert batching == BatchingSpec(preferred_sizes=(8,))


def test_capacity_and_workers() -> None:
    """A model's own parameters come before the settings."""
    parameters = """
    parameters { key: "qinfer.lane_capacity" value { string_value: "12" } }
    parameters { key: "qinfer.min_workers" value { string_value: "0" } }
    parameters { key: "qinfer.max_strings" value { string_value: "7" } }
    parameters { key: "qinfer.binary_outputs" value { string_value: "y, z" } }
    """

    own, default = to_spec(normal(ONNX + parameters), LIMITS), to_spec(normal(ONNX), LIMITS)

    assert (own.lane_capacity, own.min_workers, own.max_strings) == (12, 0, 7)
    assert own.parameters["qinfer.binary_outputs"] == "y, z"
    assert (default.lane_capacity, default.min_workers) == (LIMITS.lane_capacity, 1)
    assert default.max_strings == LIMITS.max_strings


def test_without_dynamic_batching_requests_are_not_merged() -> None:
    """Triton's default scheduler, and a model without a batch dimension."""
    assert to_spec(normal(ONNX + "max_batch_size: 8"), LIMITS).batching is None
    assert to_spec(normal(ONNX + "dynamic_batching { }"), LIMITS).batching is None


def test_answers_keep_the_order_where_that_is_configured() -> None:
    """Also without a batch dimension, and never of decoupled models."""
    ordered = ONNX + "dynamic_batching { preserve_ordering: true }"

    assert to_spec(normal(ordered), LIMITS).preserves_order
    assert not to_spec(normal(ONNX + "dynamic_batching { }"), LIMITS).preserves_order
    assert not to_spec(normal(ordered + "model_transaction_policy { decoupled: true }"), LIMITS).preserves_order


def test_completion_makes_a_batch_dimension_of_a_variable_first_one() -> None:
    """A model without configuration gets Triton's default batch size, and dynamic batching."""
    config = normalise(ModelConfig(), "m", ["model.onnx"], file_tensors())

    assert config.max_batch_size == 4
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([4], [2])


def test_completion_without_a_variable_first_dimension() -> None:
    """Then the dimensions are complete, and nothing is batched."""
    config = normalise(ModelConfig(), "m", ["model.onnx"], file_tensors(x=(1, 4)))

    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([1, 4], [-1, 2])


def test_completion_keeps_what_is_configured() -> None:
    """A partial configuration is completed only where it says nothing."""
    config = normalise(parse("max_batch_size: 32"), "m", ["model.onnx"], file_tensors())

    assert config.max_batch_size == 32
    assert list(config.dynamic_batching.preferred_batch_size) == [32]


def test_a_configuration_with_tensors_is_taken_as_it_is() -> None:
    """As in Triton: inputs and outputs are there, so neither batch size nor batching is added."""
    config = normalise(parse(ONNX + "max_batch_size: 8"), "m", (), file_tensors())

    assert config.max_batch_size == 8
    assert not config.HasField("dynamic_batching")


def test_completion_reshapes_batched_scalars() -> None:
    """An output of shape [batch] is [1] to the client and reshaped, because dims can't be empty."""
    config = normalise(ModelConfig(), "m", ["model.onnx"], file_tensors(y=(-1,)))

    assert list(config.output[0].dims) == [1]
    assert config.output[0].HasField("reshape")


@pytest.mark.parametrize("text", ["", 'input { name: "x" data_type: TYPE_FP32 dims: 1 }'])
def test_the_model_sees_a_scalar(text: str) -> None:
    """Clients see [1], whether the configuration says so or is completed."""
    config = normalise(parse(text), "m", ["model.onnx"], file_tensors(x=(), y=(2,)))

    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape")
    assert not config.input[0].reshape.shape


def test_a_python_model_needs_no_inputs_and_outputs() -> None:
    """It may do nothing but call others."""
    assert not normal('backend: "python"').input


@pytest.mark.parametrize(
    ("text", "tensors", "message"),
    [
        ("max_batch_size: 2", file_tensors(x=(1, 4)), "autofill failed for model 'm': model does not support batching"),
        (ONNX + "max_batch_size: 2", file_tensors(x=(1, 4)), "for the model to support batching the shape should"),
        (ONNX, file_tensors(), "expects 2 dimensions .* but the model configuration specifies 1 dimensions"),
        (ONNX + "max_batch_size: 2", file_tensors(x=(-1, 5)), r"expects shape \[-1, 5\] but .* shape \[-1, 4\]"),
        (ONNX.replace("FP32", "INT8"), file_tensors(), "the model expects data-type TYPE_FP32 but"),
        (
            ONNX.replace('"y"', '"z"'),
            file_tensors(x=(4,), y=(2,)),
            "unexpected inference output 'z', allowed outputs are: y",
        ),
        (
            ONNX + IO.splitlines()[1].replace('"x"', '"z"'),
            file_tensors(),
            "configuration expects 2 inputs, model provides 1",
        ),
    ],
)
def test_contradictions_with_the_model_file_are_refused(text: str, tensors: FileTensors, message: str) -> None:
    """What the model file declares wins an argument, with Triton's text."""
    config = parse('backend: "onnxruntime"' + text.replace('backend: "onnxruntime"', ""))
    config.name = "m"

    with pytest.raises(ModelLoadFailed, match=message):
        complete(config, tensors)


def test_the_message_comes_without_the_grpc_runtime() -> None:
    """Importing the configuration must not load grpc, and a later import of tritonclient must share the message."""
    code = """
import sys
from qinfer.models.config.config import ModelConfig
assert "grpc" not in sys.modules
from tritonclient.grpc import model_config_pb2, service_pb2
assert model_config_pb2.ModelConfig is ModelConfig
assert service_pb2.ModelConfigResponse(config=ModelConfig(name="m")).config.name == "m"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.parametrize("text", ["model_transaction_policy { decoupled: true }", "sequence_batching { direct { } }"])
def test_the_response_cache_is_for_single_responses(text: str) -> None:
    """Triton's text."""
    with pytest.raises(ModelLoadFailed, match=r"Response Cache does not currently support model [^ ]+ with '"):
        normal(f"{ONNX} response_cache {{ enable: true }} {text}")


@pytest.mark.parametrize("unit", ["{},", '"",', "[],"])
def test_a_configuration_of_many_objects_is_refused_unread(unit: str) -> None:
    with pytest.raises(ModelLoadFailed, match=r"has at least .* values, more than the .* that it may have"):
        from_json('{"input":[' + unit * 10**6 + unit[:-1] + "]}")

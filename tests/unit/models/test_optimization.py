"""Which fields of `optimization` do something, and for which backend."""

import pytest
from google.protobuf.descriptor import Descriptor

from qinfer.models.config.config import normalise, parse, to_spec
from qinfer.models.config.message import model_config_pb2
from qinfer.models.config.optimization import BACKENDS, EFFECTS, without_effect

PORTS = """
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
EVERYTHING = """
optimization {
  graph { level: 1 } priority: PRIORITY_MAX eager_batching: true gather_kernel_buffer_threshold: 8
  cuda { graphs: true busy_wait_events: true output_copy_stream: true graph_spec { batch_size: 1 } }
  input_pinned_memory { enable: false } output_pinned_memory { enable: false }
  execution_accelerators {
    gpu_execution_accelerator: [ { name: "tensorrt" }, { name: "cuda" }, { name: "auto_mixed_precision" } ]
    cpu_execution_accelerator: [ { name: "openvino" }, { name: "auto_mixed_precision" } ]
  }
}
instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU gpus: [ 0 ] } ]
"""


def unused(backend: str, text: str) -> list[str]:
    return without_effect(normalise(parse(f'backend: "{backend}" max_batch_size: 4 {PORTS} {text}'), "m"))


def test_every_field_of_the_message_is_in_the_table() -> None:
    def fields(message: Descriptor) -> set[str]:
        found = set()
        for field in message.fields:
            parts = field.message_type.fields if field.message_type and field.name in ("graph", "cuda") else ()
            found |= {f"{field.name}.{part.name}" for part in parts} or {field.name}
        return found

    named = {field.split(".")[0] if field.startswith("execution") else field for field in EFFECTS}

    assert named == fields(model_config_pb2.ModelOptimizationPolicy.DESCRIPTOR)
    assert {backend for effects in EFFECTS.values() for backend in effects} <= set(BACKENDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_fields_load_and_those_without_effect_are_named(backend: str) -> None:
    """Of the fields that a configuration sets, with instances on both kinds of device."""
    assert sorted(unused(backend, EVERYTHING)) == sorted(f for f, effects in EFFECTS.items() if backend not in effects)


@pytest.mark.parametrize("text", ["", "optimization { }", "optimization { input_pinned_memory { enable: true } }"])
def test_defaults_are_not_named(text: str) -> None:
    assert unused("onnxruntime", text) == []


def test_an_accelerator_of_the_other_device_does_nothing() -> None:
    text = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }'

    assert unused("onnxruntime", text + "instance_group { kind: KIND_CPU }") == ["execution_accelerators.gpu.tensorrt"]
    assert unused("onnxruntime", text + "instance_group { kind: KIND_GPU gpus: [ 0 ] }") == []


def test_an_accelerator_that_a_backend_does_not_know_does_nothing() -> None:
    text = 'optimization { execution_accelerators { cpu_execution_accelerator: [ { name: "xla" } ] } }'

    assert unused("pytorch", text) == ["execution_accelerators.cpu.xla"]


def test_backends_of_others_are_left_alone() -> None:
    """They may read all fields."""
    assert unused("mine", EVERYTHING) == []


def test_what_backends_read_reaches_them() -> None:
    def read(text: str) -> tuple[bool, bool, bool]:
        spec = to_spec(normalise(parse(f'backend: "pytorch" {PORTS} {text}'), "m"))
        return spec.urgent, spec.pins_inputs, spec.pins_outputs

    assert read("") == (False, True, True)
    assert read(EVERYTHING) == (True, False, False)
    assert read("optimization { output_pinned_memory { enable: false } }") == (False, True, False)

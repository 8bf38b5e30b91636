"""Configurations survive their round trips; whatever else is said to be one is refused with an error, never a crash."""

import json
from contextlib import suppress
from typing import Any

from google.protobuf import json_format, text_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import ModelConfig, from_json, normalise, parse, to_json, to_spec
from qinfer.models.config.file_tensors import read_openvino
from qinfer.models.config.message import model_config_pb2
from qinfer.tensors import CONFIG_DATATYPES

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
dims = st.lists(st.one_of(st.just(-1), st.integers(1, 2**62)), min_size=1, max_size=4)
datatypes = st.sampled_from(sorted(CONFIG_DATATYPES)).map(model_config_pb2.DataType.Value)


def _draw_policy(draw: st.DrawFn, policy: Any) -> None:
    policy.timeout_action = draw(st.sampled_from((0, 1)))
    policy.default_timeout_microseconds = draw(st.integers(0, 2**64 - 1))
    policy.allow_timeout_override = draw(st.booleans())
    policy.max_queue_size = draw(st.integers(0, 2**32 - 1))


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    config = ModelConfig(backend=draw(st.sampled_from(("onnxruntime", "python", "other"))))
    config.max_batch_size = draw(st.integers(0, 2**31 - 1))
    for target in (config.input, config.output):
        for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
            target.add(name=name, data_type=draw(datatypes), dims=draw(dims))
    if draw(st.booleans()):
        config.dynamic_batching.max_queue_delay_microseconds = draw(st.integers(0, 2**64 - 1))
        if config.max_batch_size:
            sizes = draw(st.lists(st.integers(1, config.max_batch_size), max_size=3))
            config.dynamic_batching.preferred_batch_size.extend(sizes)
        levels = config.dynamic_batching.priority_levels = draw(st.integers(0, 2**64 - 1))
        config.dynamic_batching.default_priority_level = draw(st.integers(1, levels)) if levels else 0
        for level in draw(st.lists(st.integers(1, levels), max_size=2)) if levels else ():
            _draw_policy(draw, config.dynamic_batching.priority_queue_policy[level])
        _draw_policy(draw, config.dynamic_batching.default_queue_policy)
    for count in draw(st.lists(st.integers(0, 9), max_size=2)):
        config.instance_group.add(count=count)
    for key, value in draw(st.dictionaries(names.filter(lambda n: not n.startswith("qinfer.")), names)).items():
        config.parameters[key].string_value = value
    if draw(st.booleans()):
        config.version_policy.specific.versions.extend(draw(st.lists(st.integers(1, 2**63 - 1), min_size=1)))
    return config


@given(configs())
def test_text_round_trip(config: ModelConfig) -> None:
    """A normalised configuration, printed as text and parsed, is the same, and normalising it again changes nothing."""
    normal = normalise(config, "m")

    again = parse(text_format.MessageToString(normal))

    assert again == normal
    assert normalise(again, "m") == normal


@given(configs())
def test_json_round_trip(config: ModelConfig) -> None:
    """A normalised configuration survives the JSON dialect, and makes the same spec."""
    normal = normalise(config, "m")

    again = from_json(to_json(normal))

    assert again == normal
    assert to_spec(again, LimitSettings()) == to_spec(normal, LimitSettings())


patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines of tests are busy

FIELDS = [field.name for field in ModelConfig.DESCRIPTOR.fields]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["KIND_GPU", "TYPE_FP32"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from([*FIELDS, "kind", "dims", "data_type", "key"]), names), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
objects = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)
tokens = st.sampled_from(
    [
        *FIELDS,
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        ";",
        '"a"',
        "'",
        "-1",
        "1e999",
        "0x",
        "TYPE_FP32",
        "#",
        "\n",
        "<",
        ">",
        "true",
    ]
)


IR_PIECES = [
    b"<net>", b"<layers>", b"</layers></net>", b'<layer id="0" name="x" type="Parameter">', b"</layer>", b"<output>",
    b'<layer id="1" name="y" type="Result">', b'<port id="0" precision="FP32">', b"<dim>4</dim>", b"<dim>x</dim>",
    b"</port></output>", b"<input>", b"</port></input>", b"<edges>", b"</edges>", b"<!DOCTYPE a>",
    b'<edge from-layer="0" from-port="0" to-layer="1" to-port="0"/>', b'<data shape="..."/>', b"<data/>",
]  # fmt: skip


def refused_or_usable(config: ModelConfig) -> None:
    """Either is fine; anything else that is raised is not."""
    with suppress(ModelLoadFailed):
        to_json(to_spec_of(normalise(config, "m", ["model.onnx"], gpus=1)))


def to_spec_of(config: ModelConfig) -> ModelConfig:
    to_spec(config, LimitSettings())
    return config


@patient
@given(st.one_of(st.text(max_size=200), st.lists(tokens, max_size=20).map(" ".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    """config.pbtxt may hold anything."""
    with suppress(ModelLoadFailed):
        refused_or_usable(parse(text))


@patient
@given(st.one_of(st.text(max_size=200), values.map(json.dumps), objects.map(json.dumps)))
def test_any_override_is_read_or_refused(text: str) -> None:
    """So may the configuration of a load request."""
    with suppress(ModelLoadFailed):
        refused_or_usable(from_json(text))


@patient
@given(objects)
def test_any_message_is_usable_or_refused(fields: dict[str, Any]) -> None:
    """Fields that are right on their own, in any combination."""
    config = ModelConfig()
    for name, value in fields.items():
        with suppress(json_format.ParseError, ValueError, TypeError, RecursionError):
            json_format.ParseDict({name: value}, config)
    refused_or_usable(config)


@patient
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(IR_PIECES), max_size=12).map(b"".join)))
def test_any_xml_is_read_or_refused(content: bytes) -> None:
    """model.xml may hold anything."""
    with suppress(ModelLoadFailed):
        read_openvino(content, "model.xml")


def test_deep_json_is_refused() -> None:
    """Nesting that would exhaust the stack is an error as any other."""
    for text in ("[" * 100_000, '{"a":' * 100_000, '{"optimization":' * 50_000 + "1" + "}" * 50_000):
        with suppress(ModelLoadFailed):
            from_json(text)
            raise AssertionError("it was read")

"""Configurations survive their round trips."""

from typing import Any

from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from qinfer.repository.config import ModelConfig, from_json, normalise, parse, to_json, to_spec
from qinfer.repository.model_config import model_config_pb2
from qinfer.settings import LimitSettings
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

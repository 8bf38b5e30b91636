"""Candidates and configurations."""

from typing import Any

import pytest

from qinfer.cli.analyze.space import Candidate, computations, configured, powers_of_two, today_of
from qinfer.errors import InvalidRequest

CONFIG: dict[str, Any] = {
    "name": "m",
    "backend": "onnxruntime",
    "platform": "onnxruntime_onnx",
    "max_batch_size": 8,
    "instance_group": [{"kind": "KIND_CPU", "count": 2, "name": "m_0"}],
    "dynamic_batching": {
        "preferred_batch_size": [4, 8],
        "max_queue_delay_microseconds": 500,
        "preserve_ordering": True,
    },
    "parameters": {"intra_op_thread_count": {"string_value": "2"}, "mine": {"string_value": "x"}},
}
TODAY = Candidate(2, 8, 0.5, 2, "onnxruntime")


def test_the_present_configuration_is_a_candidate_that_changes_nothing() -> None:
    assert today_of(CONFIG) == TODAY
    assert configured(CONFIG, TODAY) == CONFIG


@pytest.mark.parametrize(
    ("candidate", "field", "value"),
    [
        (TODAY._replace(instances=4), "instance_group", [{"kind": "KIND_CPU", "count": 4, "name": "m_0"}]),
        (
            TODAY._replace(max_batch=4),
            "dynamic_batching",
            {"preferred_batch_size": [4], "max_queue_delay_microseconds": 500, "preserve_ordering": True},
        ),
        (TODAY._replace(max_batch=4), "max_batch_size", 4),
        (
            TODAY._replace(threads=1),
            "parameters",
            CONFIG["parameters"] | {"intra_op_thread_count": {"string_value": "1"}},
        ),
        (
            TODAY._replace(precision="mixed"),
            "optimization",
            {
                "execution_accelerators": {
                    "cpu_execution_accelerator": [{"name": "auto_mixed_precision"}],
                    "gpu_execution_accelerator": [{"name": "auto_mixed_precision"}],
                }
            },
        ),
        (TODAY._replace(backend="openvino"), "default_model_filename", "model.onnx"),
        (
            TODAY._replace(backend="openvino"),
            "parameters",
            {"mine": {"string_value": "x"}, "INFERENCE_NUM_THREADS": {"string_value": "2"}},
        ),
    ],
)
def test_a_candidate_changes_what_differs(candidate: Candidate, field: str, value: Any) -> None:
    changed = configured(CONFIG, candidate)

    assert changed[field] == value
    assert today_of(changed) == candidate


def test_batches_of_one_row_need_no_batcher() -> None:
    changed = configured(CONFIG, TODAY._replace(max_batch=1, delay_ms=0.0))

    assert "dynamic_batching" not in changed
    assert today_of(changed) == TODAY._replace(max_batch=1, delay_ms=0.0)


def test_instances_of_several_groups_are_not_divided() -> None:
    several = CONFIG | {"instance_group": [{"count": 1}, {"count": 1}]}

    assert configured(several, TODAY) == several
    with pytest.raises(InvalidRequest, match=r"2 instance groups.* give --instances 2"):
        configured(several, TODAY._replace(instances=3))


def test_powers_of_two() -> None:
    assert [powers_of_two(most) for most in (0, 1, 2, 6, 64)] == [
        (0,),
        (1,),
        (1, 2),
        (1, 2, 4, 6),
        (1, 2, 4, 8, 16, 32, 64),
    ]


def test_full_precision_removes_the_accelerator_alone() -> None:
    mixed = configured(CONFIG, TODAY._replace(precision="mixed"))
    mixed["optimization"]["execution_accelerators"]["cpu_execution_accelerator"].append({"name": "openvino"})

    accelerators = configured(mixed, TODAY)["optimization"]["execution_accelerators"]

    assert accelerators == {"cpu_execution_accelerator": [{"name": "openvino"}], "gpu_execution_accelerator": []}


def test_instances_and_batches_do_not_change_answers() -> None:
    first = computations({"m": TODAY})

    assert first == computations({"m": TODAY._replace(instances=4, max_batch=1, delay_ms=0.0)})
    for other in ({"threads": 1}, {"backend": "openvino"}, {"precision": "mixed"}):
        assert computations({"m": TODAY._replace(**other)}) != first
    assert computations({"other": TODAY}) != first

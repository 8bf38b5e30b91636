"""`auto_complete_config`: run in a process of its own, by Triton's rules and with its texts."""

from pathlib import Path

import pytest

from qinfer.backends.python import complete_config
from qinfer.backends.python_host.utils import ModelConfig as HostConfig
from qinfer.backends.registry import completer
from qinfer.errors import BackendUnavailable, ModelLoadFailed
from qinfer.models.config.config import normalise, parse, to_json
from qinfer.models.config.message import ModelConfig

COMPLETING = """
import os, sys, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        {body}
        return auto_complete_model_config
"""

FULL = """
        auto_complete_model_config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4], "optional": True})
        auto_complete_model_config.add_output({"name": "y", "data_type": "TYPE_STRING", "dims": [-1]})
        auto_complete_model_config.set_max_batch_size(8)
        auto_complete_model_config.set_dynamic_batching()
"""


def completed(directory: Path, body: str, config: str = "", timeout_s: float = 60.0) -> ModelConfig:
    version = directory / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(COMPLETING.replace("{body}", body))
    return complete_config(parse(config), version, timeout_s)


def test_a_model_says_what_its_configuration_is(tmp_path: Path) -> None:
    """The result is one that can be served."""
    config = normalise(completed(tmp_path, FULL, 'backend: "python"'), "m", ["model.py"])

    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (8, True)
    assert (config.input[0].name, list(config.input[0].dims), config.input[0].optional) == ("x", [4], True)
    assert (config.output[0].name, list(config.output[0].dims)) == ("y", [-1])


def test_what_the_configuration_says_stays(tmp_path: Path) -> None:
    """The model completes it."""
    said = (
        'name: "m" backend: "python" max_batch_size: 2 instance_group { count: 3 } input { name: "x" optional: true }'
    )

    config = completed(tmp_path, FULL, said)

    assert (config.name, config.max_batch_size, config.instance_group[0].count) == ("m", 8, 3)
    assert len(config.input) == 1


def test_a_model_that_completes_nothing(tmp_path: Path) -> None:
    """Leaves the configuration as it is."""
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("class TritonPythonModel: pass")
    config = parse('backend: "python" max_batch_size: 2')

    assert complete_config(config, version) == config


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise RuntimeError('no idea')", "model 'm' failed to load: RuntimeError: no idea"),
        ("os._exit(5)", "the process of model 'm' died while it was loaded (exit code 5)"),
        ("return {}", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        (
            "auto_complete_model_config.as_dict()['nonsense'] = 1",
            "model configuration is not valid JSON",
        ),
        ("import no_such_module", "install what provides 'no_such_module' in the worker's environment"),
    ],
)
def test_a_completion_that_fails(tmp_path: Path, body: str, text: str) -> None:
    """Says why."""
    with pytest.raises(ModelLoadFailed) as caught:
        completed(tmp_path, body)

    assert text in caught.value.message


def test_a_completion_that_takes_too_long(tmp_path: Path) -> None:
    """Is given up."""
    with pytest.raises(ModelLoadFailed, match=r"auto_complete_config of model 'm' took more than 0\.5 s"):
        completed(tmp_path, "time.sleep(60)", timeout_s=0.5)


def test_the_registry_knows_who_completes() -> None:
    """Only the backends whose models have code of their own."""
    assert completer("python") is complete_config
    with pytest.raises(BackendUnavailable, match="models of backend 'onnxruntime' can't complete"):
        completer("onnxruntime")


def given(text: str = 'name: "m"') -> HostConfig:
    return HostConfig(to_json(parse(text)))


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
WITH_X = 'name: "m" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ({"data_type": "TYPE_FP32", "dims": [1]}, "input in auto-complete-config function for model 'm' is missing"),
        ({"name": "x", "dims": [1]}, "input 'x' in auto-complete-config function for model 'm' is missing 'data_type'"),
        ({"name": "x", "data_type": "TYPE_FP32"}, "is missing 'dims' property."),
        ({**X, "labels": []}, "contains property other than 'name', 'data_type', 'dims' and 'optional'."),
        ({**X, "data_type": "TYPE_INT8"}, "configuration expects datatype TYPE_FP32 for input 'x', model provides"),
        ({**X, "dims": [5]}, "the model expects dims [5] but the model configuration specifies dims [4]"),
        ({**X, "optional": True}, "the model expects optional True but the model configuration specifies optional"),
    ],
)
def test_inputs_that_do_not_fit(added: dict[str, object], text: str) -> None:
    """Are refused as Triton refuses them."""
    with pytest.raises(ValueError, match="m'") as caught:
        given(WITH_X).add_input(added)

    assert text in str(caught.value)


def test_what_contradicts_the_configuration() -> None:
    """Schedulers, batch sizes, transaction policies."""
    with pytest.raises(ValueError, match="configuration specified max_batch_size 4, but in auto-complete-config"):
        given(WITH_X).set_max_batch_size(2)
    with pytest.raises(ValueError, match="scheduling_choice as 'sequence_batching'"):
        given('name: "m" sequence_batching { }').set_dynamic_batching()
    with pytest.raises(ValueError, match="property other than 'decoupled'"):
        given().set_model_transaction_policy({"other": 1})
    with pytest.raises(ValueError, match="trying to change decoupled property"):
        given('name: "m" model_transaction_policy { decoupled: true }').set_model_transaction_policy(
            {"decoupled": False}
        )

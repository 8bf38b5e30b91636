"""Completes a configuration by the model's own `auto_complete_config`, in a process that does nothing else."""

import threading
from pathlib import Path

from qinfer.backends.python import ENVIRONMENT, ask, check_model
from qinfer.backends.python_host.messages import Complete, Completed
from qinfer.backends.python_host.process import HostProcess
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.dialect import from_json, to_json
from qinfer.models.config.message import ModelConfig

COMPLETE_S = 120.0
"""How long importing the model and `auto_complete_config` may take together."""


def complete_config(config: ModelConfig, version_dir: Path, timeout_s: float = COMPLETE_S) -> ModelConfig:
    """Returns the configuration as the model completes it; a model without `auto_complete_config` changes nothing.

    Args:
        config: The configuration so far; it is left as it is.
        version_dir: The directory of the version to ask; blocking.
        timeout_s: When to give up.

    Raises:
        ModelLoadFailed: The model's code raised, died, took too long, or made what is no configuration.
    """
    model = config.name or version_dir.parent.name
    named = ModelConfig()
    named.CopyFrom(config)
    named.name = model
    filename = config.default_model_filename or "model.py"
    environment = config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in config.parameters else ""
    check_model(model, environment, version_dir, filename)
    process = HostProcess(model)
    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        answer = ask(process, Complete(str(version_dir), filename, to_json(named)), Completed, model)
    except ModelLoadFailed:
        if is_late.is_set():
            raise ModelLoadFailed(
                f"auto_complete_config of model '{model}' took more than {timeout_s:g} s; write its config.pbtxt"
            ) from None
        raise
    finally:
        timer.cancel()
        process.kill()
    completed = from_json(answer.config)
    if not config.name:
        completed.name = ""
    return completed

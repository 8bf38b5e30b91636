"""`pb_utils.load_model`, `unload_model` and `is_model_ready`: Triton's Model Loading API, executed by the worker.

https://github.com/triton-inference-server/python_backend#model-loading-api
"""

from collections.abc import Mapping

from qinfer.backends.python_host.errors import TritonModelException, text
from qinfer.backends.python_host.inference import connected
from qinfer.backends.python_host.messages import Manage

_FILE = "file:"


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Loads or reloads a model; returns when it is ready.

    Args:
        model_name: The name of the model.
        config: A configuration in JSON, in place of the model's `config.pbtxt`.
        files: `file:<version>/<file>` → content, in place of the model's files; only with `config`.
    """
    named, contents = [], []
    for key, content in (files or {}).items():
        if not key.startswith(_FILE):
            raise TritonModelException(f"unrecognized load parameter '{key[:100]}'; 'file:…' is known")
        named.append(text(key.removeprefix(_FILE), "the name of a file"))
        contents.append(bytes(content))
    asked = Manage("load", text(model_name, "model_name"), config=text(config, "config"), files=named)
    connected().manage(asked, contents)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:  # noqa: FBT001, FBT002  (Triton's)
    """Unloads a model, and those that only this ensemble uses if `unload_dependents`; waiting requests are answered."""
    connected().manage(
        Manage("unload", text(model_name, "model_name"), unload_dependents=bool(unload_dependents)),
    )


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Returns whether a model can be called; an empty version means any version."""
    version = 0
    if model_version:
        try:
            version = int(model_version)
        except ValueError:
            version = 0
        if version < 1:
            raise TritonModelException(
                f"failed to get model version from specified version string '{model_version}', "
                "version should be an integral value > 0"
            )
    return connected().manage(Manage("ready", text(model_name, "model_name"), version))

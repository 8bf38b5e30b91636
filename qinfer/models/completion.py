"""Configurations that only a runtime can complete, such as those of Python models: once for each content, by a worker.

A gateway or the command line stores such a model as `pending`. A worker completes it, stores the result under the
content's key, and then the model under a new generation. Whoever stores the same content again finds the result.
"""

import hashlib

import msgspec

from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import from_json, to_spec
from qinfer.models.config.to_spec import MIN_WORKERS
from qinfer.models.state import StoredModel
from qinfer.models.store import ControlStore

_ANY_LIMITS = LimitSettings()  # nothing that depends on them is read here


class Completion(msgspec.Struct, frozen=True):
    """The result of a completion.

    Attributes:
        config: The completed configuration, normalised, as `StoredModel.config` has it; empty when it failed.
        error: Why it failed; it is not tried again until the content changes.
    """

    config: str = ""
    error: str = ""


def completion_key(stored: StoredModel) -> str:
    """Returns the key of a pending model's content: its files, and the configuration that is to be completed."""
    return hashlib.sha256(f"{stored.content_hash}\n{stored.config}".encode()).hexdigest()


def completed(stored: StoredModel, completion: Completion) -> StoredModel:
    """Returns a pending model as it is with the result of its completion."""
    if completion.error:
        return msgspec.structs.replace(stored, pending="", config="", error=completion.error)
    try:
        config = from_json(completion.config)
        spec = to_spec(config, _ANY_LIMITS)
    except ModelLoadFailed as error:
        return msgspec.structs.replace(stored, pending="", config="", error=error.message)
    min_workers = spec.min_workers if MIN_WORKERS in config.parameters else stored.min_workers
    return msgspec.structs.replace(stored, pending="", config=completion.config, min_workers=min_workers)


async def find_completion(stored: StoredModel, store: ControlStore) -> Completion | None:
    """Returns the result of the completion of a pending model; `None` when none has ended yet."""
    text = await store.completion(completion_key(stored))
    return None if text is None else msgspec.json.decode(text, type=Completion)


async def put_completion(stored: StoredModel, completion: Completion, store: ControlStore) -> None:
    """Stores the result of a completion, and the model with it under the next generation, and wakes everyone.

    A newer generation of the model stays as it is. Several workers may do this at once.

    Raises:
        BrokerUnavailable: The store can't be reached.
    """
    await store.put_completion(completion_key(stored), msgspec.json.encode(completion).decode())
    first = await find_completion(stored, store)  # of several the first one counts
    done = completed(stored, first or completion)
    if await store.put_model(msgspec.structs.replace(done, generation=stored.generation + 1)):
        await store.wake()

"""The worker's side of the Model Loading API: each request has a thread."""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress

from qinfer.backends.base import ManagesModels
from qinfer.backends.python_host.channel import Buffer, Channel
from qinfer.backends.python_host.messages import Manage, ManageReply
from qinfer.errors import QinferError, UnsupportedFeature

logger = logging.getLogger("qinfer.backends.python")


class Managing:
    """Executes one instance's requests; refuses all without `models`."""

    def __init__(self, models: ManagesModels | None, model: str) -> None:
        self._models = models
        self._model = model

    def hear(self, channel: Channel, message: Manage, buffers: Sequence[Buffer]) -> None:
        """Starts a request, which answers by the channel."""
        files = {name: bytes(buffer.data) for name, buffer in zip(message.files, buffers, strict=True)}
        threading.Thread(
            target=self._answer_request, args=(channel, message, files), name=f"manage-{self._model}", daemon=True
        ).start()

    def _answer_request(self, channel: Channel, message: Manage, files: dict[str, bytes]) -> None:
        try:
            answer = ManageReply(message.number, self._done(message, files))
        except QinferError as error:
            answer = ManageReply(message.number, error=error.message)
        except Exception:  # the model must get an answer
            logger.exception("model management failed", extra={"model": self._model})
            answer = ManageReply(message.number, error="it failed; the worker's log says why")
        with suppress(OSError):
            channel.send(answer)

    def _done(self, message: Manage, files: dict[str, bytes]) -> bool:
        if self._models is None:
            raise UnsupportedFeature("models can't be loaded, unloaded or looked at from here")
        if message.action == "ready":
            return self._models.is_ready(message.model, message.version)
        logger.info(
            "a model asks for another", extra={"model": self._model, "action": message.action, "other": message.model}
        )
        if message.action == "load":
            self._models.load(message.model, message.config, files)
        else:
            self._models.unload(message.model, unload_dependents=message.unload_dependents)
        return False

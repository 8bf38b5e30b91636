"""Writes on where a prompt ends, word by word: a decoupled model, whose responses leave as they are made.

A word follows the two before it as often as in `alice.txt`. That is no good writer, but it needs no package; a language
model is served in the same way. Ask it, with this directory in a model repository:

    curl -N -d '{"prompt": "Alice was", "words": 30}' localhost:8000/v2/models/writer/generate_stream
"""

import random
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE_S = 0.05
"""About as long as a language model takes for a token."""


class TritonPythonModel:
    """The class that Triton, and so qinfer, looks for in the model's file."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the text: pairs of words, and what follows them."""
        words = Path(__file__).with_name("alice.txt").read_text(encoding="utf-8").split()
        self.following = defaultdict(list)
        for first, second, third in zip(words, words[1:], words[2:], strict=False):
            self.following[first, second].append(third)
        self.pairs = sorted(self.following)

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> None:
        """Gives each request a thread, and returns: the instance takes the next request while these write."""
        for request in requests:
            threading.Thread(target=self.write, args=(request,), daemon=True).start()

    def write(self, request: pb_utils.InferenceRequest) -> None:
        """Sends a word at a time; `send` waits where the caller does not keep up."""
        sender = request.get_response_sender()
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        prompt, count = inputs["prompt"][0].decode(), int(inputs.get("words", [50])[0])
        chance = random.Random(prompt)  # noqa: S311 - a text, no secret
        pair = tuple(prompt.split()[-2:])
        pause = threading.Event()
        for _ in range(count):
            if sender.is_cancelled():
                break
            if pair not in self.following:
                pair = chance.choice(self.pairs)
            word = chance.choice(self.following[pair])
            pair = (pair[1], word)
            text = pb_utils.Tensor("text", np.array([f" {word}"], dtype=object))
            sender.send(pb_utils.InferenceResponse([text]))
            pause.wait(PAUSE_S)
        sender.send(flags=FINAL)

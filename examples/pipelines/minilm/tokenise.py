"""Step `minilm_tokenise`: `text` BYTES[batch, 1] → what the transformer reads, INT64[batch, tokens] each."""

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer

MAX_TOKENS = 256


class TritonPythonModel:
    """Tokenises the texts of each request, padded to the longest of them."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the tokenizer, which is beside this file."""
        self.tokenizer = Tokenizer.from_file(str(Path(__file__).parent / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding()

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns the tokens of each request."""
        return [self.tokens(text.as_numpy()) for request in requests for text in request.inputs()]

    def tokens(self, texts: Any) -> pb_utils.InferenceResponse:
        """Returns the tokens of some texts."""
        found = self.tokenizer.encode_batch([text.decode() for text in texts[:, 0]])
        columns = {
            "input_ids": [one.ids for one in found],
            "attention_mask": [one.attention_mask for one in found],
            "token_type_ids": [one.type_ids for one in found],
        }
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, np.array(rows, np.int64)) for name, rows in columns.items()]
        )

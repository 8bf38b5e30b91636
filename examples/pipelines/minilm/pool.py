"""Step `minilm_pool`: the states of tokens FP32[batch, tokens, 384], and their mask → `embedding` FP32[batch, 384]."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Takes the mean of the states under the mask, of length 1."""

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns the embeddings of each request."""
        responses = []
        for request in requests:
            given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            mask = given["attention_mask"][..., np.newaxis]
            mean = (given["states"] * mask).sum(1) / mask.sum(1).clip(1)
            embedding = (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype(np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("embedding", embedding)]))
        return responses

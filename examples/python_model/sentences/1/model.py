"""Counts the words and the letters of texts: a model that is nothing but Python.

Copy the directory `sentences` into a model repository, and ask it:

    from qinfer import Client

    with Client("http://localhost:8000") as client:
        result = client.infer("sentences", {"text": np.array([[b"to be or not to be"]], dtype=object)})
        print(result["words"], result["letters"])
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The class that Triton, and so qinfer, looks for in the model's file."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: pb_utils.ModelConfig) -> pb_utils.ModelConfig:
        """Says what the configuration would: there is no `config.pbtxt`."""
        auto_complete_model_config.add_input({"name": "text", "data_type": "TYPE_STRING", "dims": [1]})
        auto_complete_model_config.add_output({"name": "words", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.add_output({"name": "letters", "data_type": "TYPE_INT32", "dims": [1]})
        auto_complete_model_config.set_max_batch_size(32)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Runs once in each instance's process: load weights here."""
        self.name = json.loads(args["model_config"])["name"]
        pb_utils.Logger.log_info(f"{self.name} is ready, as {args['model_instance_name']}")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Answers requests: one response for each, in order; an error of one leaves the others alone."""
        responses = []
        for request in requests:
            (text,) = request.inputs()  # of several, pb_utils.get_input_tensor_by_name(request, "text") finds one
            texts = text.as_numpy()
            try:
                decoded = [element.decode() for element in texts.ravel()]
            except UnicodeDecodeError:
                error = pb_utils.TritonError("text is not UTF-8", pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            words = np.array([len(sentence.split()) for sentence in decoded], dtype=np.int32).reshape(texts.shape)
            letters = np.array([sum(map(str.isalpha, sentence)) for sentence in decoded], dtype=np.int32).reshape(
                texts.shape
            )
            outputs = [pb_utils.Tensor("words", words), pb_utils.Tensor("letters", letters)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

    def finalize(self) -> None:
        """Runs once before the process ends."""
        pb_utils.Logger.log_info(f"{self.name} ends")

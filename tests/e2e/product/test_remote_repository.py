"""The whole server with its models in an object store, asked by Triton's client."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton

from tests.e2e.conftest import running
from tests.support import models
from tests.support.servers import object_stores


@pytest.mark.matrix
def test_models_are_served_from_s3(tmp_path: Path) -> None:
    """They are found, completed, fetched and executed; a worker's copies stay in its cache directory."""
    models.add_sub(tmp_path / "models")
    (tmp_path / "models" / "add_sub" / "config.pbtxt").unlink()
    with object_stores.s3() as store:
        url = store.upload(tmp_path / "models")
        settings = {**store.environment, "QINFER_REPOSITORY__CACHE_DIR": str(tmp_path / "cache")}
        with running(url, tmp_path, **settings) as stack:
            client = triton.InferenceServerClient(stack.address)
            assert client.get_model_config("add_sub")["max_batch_size"] == 4
            inputs = [triton.InferInput(name, [1, 4], "FP32") for name in "ab"]
            for one in inputs:
                one.set_data_from_numpy(np.ones((1, 4), np.float32))
            answer = client.infer("add_sub", inputs)
            client.close()

    assert answer.as_numpy("sum").tolist() == [[2.0] * 4]
    assert [p.name for p in (tmp_path / "cache").rglob("model.onnx")] == ["model.onnx"]

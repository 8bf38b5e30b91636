"""`qinfer.from_mlflow` in an app that the real gateway and worker serve."""

import textwrap
from pathlib import Path

import numpy as np
import pytest

from qinfer.errors import ModelLoadFailed
from qinfer.functions.examine import examine
from qinfer.testing import serve
from tests.support.framework_models import build, needs, sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs("mlflow")]


def app_of(folder: Path, directory: Path) -> Path:
    path = folder / "app.py"
    path.write_text(
        textwrap.dedent(f"""
        import qinfer

        mixer = qinfer.from_mlflow({str(directory)!r})
    """)
    )
    return path


def test_columns_of_the_signature_are_inputs(tmp_path: Path) -> None:
    repository = build("mlflow", tmp_path / "models")
    inputs, outputs = sample(repository, "mixer")
    texts = {
        name: [text.decode() for text in array.reshape(-1)] for name, array in inputs.items() if array.dtype == object
    }
    numbers = {name: array.reshape(-1) for name, array in inputs.items() if name not in texts}

    with serve(app_of(tmp_path, repository / "mixer" / "1"), timeout_s=150) as server:
        found = server.client.model("mixer")(**numbers, **texts)

    for name, expected in outputs.items():
        np.testing.assert_array_equal(np.asarray(found[name]).reshape(-1), expected.reshape(-1))


def test_a_directory_without_a_model_is_an_error_of_the_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed, match=r"app\.py:4: from_mlflow\(nowhere\): MLflow can't load the model"):
        examine(str(app_of(tmp_path, tmp_path / "nowhere")), {})

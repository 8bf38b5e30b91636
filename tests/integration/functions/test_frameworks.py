"""Models of frameworks in an app, served by the real gateway and worker."""

import textwrap
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

import qinfer
from qinfer.testing import Served, serve

APP = """
    import torch
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    import qinfer

    x, y = load_iris(return_X_y=True)
    iris = qinfer.from_sklearn(LogisticRegression(max_iter=1000).fit(x, y), method=["predict", "predict_proba"])
    double = qinfer.from_torch(torch.nn.Upsample(scale_factor=2), torch.zeros(1, 3, 4), torch.zeros(1, 3, 8))
"""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

IRIS = qinfer.from_sklearn(LogisticRegression(max_iter=1000).fit(*load_iris(return_X_y=True)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    app = tmp_path_factory.mktemp("app") / "app.py"
    app.write_text(textwrap.dedent(APP))
    with serve(app, timeout_s=100) as server:
        yield server


def post(served: Served, model: str, body: Any) -> Any:
    answer = httpx.post(f"{served.url}/models/{model}", json=body)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])


def test_an_estimator_answers_as_in_the_app(served: Served) -> None:
    x, y = load_iris(return_X_y=True)
    estimator = LogisticRegression(max_iter=1000).fit(x, y)

    found = served.client.model("iris")(x=x)

    assert found["predict"].tolist() == estimator.predict(x).tolist()
    np.testing.assert_allclose(found["predict_proba"], estimator.predict_proba(x))


def test_plain_json_of_one_item_and_of_several(served: Served) -> None:
    one, two = [5.1, 3.5, 1.4, 0.2], [6.2, 3.4, 5.4, 2.3]

    assert post(served, "iris", {"x": one})["predict"] == 0
    assert post(served, "iris", {"x": [one, two]})["predict"] == [0, 2]
    assert post(served, "iris", {"x": [1, 2, 3]})[0] == 400


def test_a_variable_dimension_varies(served: Served) -> None:
    assert served.client.model("double")(input=np.ones((2, 3, 5), np.float32))["output"].shape == (2, 3, 10)
    assert served.client.config("double")["input"][0]["dims"] == [3, -1]


def test_the_module_of_a_test_serves_its_own_model() -> None:
    with serve(IRIS, timeout_s=100) as server:
        found = server.client.model("IRIS")(x=load_iris().data)["predict"]

    assert np.mean(found == load_iris().target) > 0.95

"""Triton's Model Loading API in a `model.py`: what it asks for reaches the worker, and what it is told."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from qinfer.errors import ControlDisabled, InferenceFailed, ModelLoadFailed
from tests.support.backends import Answers
from tests.support.python_models import DECOUPLED, Streamed, batch_of, execute, floats, loaded

EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"


class Models:
    """A worker's models; notes what is asked for.

    Args:
        refusal: Raised where a model is to be loaded or unloaded.
    """

    def __init__(self, refusal: Exception | None = None) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.ready: set[str] = set()
        self._refusal = refusal

    def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None:
        self._take("load", model, config, dict(files))
        self.ready.add(model)

    def unload(self, model: str, *, unload_dependents: bool) -> None:
        self._take("unload", model, unload_dependents)
        self.ready.discard(model)

    def is_ready(self, model: str, version: int) -> bool:
        self.asked.append(("ready", model, version))
        return model in self.ready

    def _take(self, *asked: object) -> None:
        self.asked.append(asked)
        if self._refusal is not None:
            raise self._refusal


def test_models_are_loaded_looked_at_and_unloaded(tmp_path: Path) -> None:
    """With all that Triton's signatures have, and large files."""
    models = Models()
    code = execute(
        """
was = pb_utils.is_model_ready("other")
pb_utils.load_model("other")
pb_utils.load_model(model_name="other", config="{}", files={"file:1/model.onnx": b"large" * 100_000, "file:1/w": b""})
now = pb_utils.is_model_ready(model_name="other", model_version="3")
pb_utils.unload_model("other")
pb_utils.unload_model("other", unload_dependents=True)
return [reply(x(r), parameters={"was": was, "now": now}) for r in requests]
"""
    )
    answers = Answers()
    with loaded(tmp_path, code, models=models) as backend:
        backend.execute(batch_of(floats(1)), answers)

    assert answers.parameters[0] == {"was": False, "now": True}
    assert models.asked == [
        ("ready", "other", 0),
        ("load", "other", "", {}),
        ("load", "other", "{}", {"1/model.onnx": b"large" * 100_000, "1/w": b""}),
        ("ready", "other", 3),
        ("unload", "other", False),
        ("unload", "other", True),
    ]


def test_a_model_loads_another_while_it_is_loaded(tmp_path: Path) -> None:
    """As Triton's own example does, in `initialize`; but not itself."""
    code = execute(
        "return [reply(x(r), parameters={'said': self.said}) for r in requests]",
        before="""
def initialize(self, args):
    if not pb_utils.is_model_ready("other"):
        pb_utils.load_model("other")
    try:
        pb_utils.load_model("m")
    except pb_utils.TritonModelException as error:
        self.said = str(error)
""",
    )
    models, answers = Models(), Answers()
    with loaded(tmp_path, code, models=models) as backend:
        backend.execute(batch_of(floats(1)), answers)

    assert models.asked == [("ready", "other", 0), ("load", "other", "", {})]
    assert answers.parameters[0] == {"said": "model 'm' can't load itself while it is being loaded"}


def test_a_decoupled_model_loads_another(tmp_path: Path) -> None:
    """Whose messages another thread reads."""
    code = execute(
        """
pb_utils.load_model("other")
requests[0].get_response_sender().send(reply(x(requests[0])), flags=1)
"""
    )
    models, answers = Models(), Streamed()
    with loaded(tmp_path, code, models=models, more=DECOUPLED) as backend:
        backend.execute(batch_of(floats(2)), answers)
        answers.final()

    assert models.asked == [("load", "other", "", {})]


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (ControlDisabled(EXPLICIT), EXPLICIT),
        (ModelLoadFailed("failed to load 'other', no version is available"), "no version is available"),
        (RuntimeError("private"), "it failed; the worker's log says why"),
    ],
)
def test_a_refusal_is_an_exception_of_the_model(tmp_path: Path, refusal: Exception, text: str) -> None:
    """Which has its text."""
    for call in ("load_model", "unload_model"):
        code = execute(f"pb_utils.{call}('other')")
        with (
            loaded(tmp_path / call, code, models=Models(refusal)) as backend,
            pytest.raises(InferenceFailed) as caught,
        ):
            backend.execute(batch_of(floats(1)), Answers())

        assert "TritonModelException: " in caught.value.message
        assert text in caught.value.message


REFUSED = [
    ("pb_utils.load_model('other', files={'1/model.onnx': b''})", "unrecognized load parameter '1/model.onnx'"),
    ("pb_utils.is_model_ready('other', 'x')", "failed to get model version from specified version string 'x'"),
    ("pb_utils.is_model_ready('other', '0')", "failed to get model version from specified version string '0'"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_is_no_wish_is_refused_in_the_process(tmp_path: Path, call: str, text: str) -> None:
    """The worker is not asked."""
    models = Models()
    with loaded(tmp_path, execute(call), models=models) as backend, pytest.raises(InferenceFailed, match=text):
        backend.execute(batch_of(floats(1)), Answers())

    assert models.asked == []


def test_models_are_not_managed_while_one_is_finalized(tmp_path: Path) -> None:
    """Nobody listens then."""
    code = execute(
        "return [reply(x(r)) for r in requests]",
        before="""
def finalize(self):
    try:
        pb_utils.load_model("other")
    except pb_utils.TritonModelException as error:
        open(os.path.join(pb_utils.get_model_dir(), "said"), "w").write(str(error))
""",
    )
    models = Models()
    with loaded(tmp_path, code, models=models) as backend:
        backend.execute(batch_of(floats(1)), Answers())

    said = (tmp_path / "m" / "1" / "said").read_text()
    assert said == "models can be loaded, unloaded and looked at in `initialize` and `execute` only"
    assert models.asked == []

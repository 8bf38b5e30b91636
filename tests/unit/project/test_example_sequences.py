"""The example of a stateful model: both of silero-vad's rates, with the states that a server keeps."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest

from examples.sequences.build_model import RATES, Rate, build
from qinfer.models.config.config import parse
from qinfer.models.config.sequences import to_sequence_spec
from tests.support import silero

CALLS, FRAMES = 9, 20


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("silero")
    build(path)
    return path


@pytest.mark.parametrize("rate", RATES, ids=lambda rate: rate.model)
def test_frames_are_judged_as_by_the_package(repository: Path, rate: Rate) -> None:
    """Calls that share batches, each at another frame of its own, get what the package gives each of them alone."""
    session = onnxruntime.InferenceSession(
        repository / rate.model / "1" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    calls = silero.calls(rate, CALLS, FRAMES)
    expected = silero.probabilities(rate, calls)
    states = {name: np.zeros((CALLS, *dims), np.float32) for name, dims in _states(rate)}
    found = np.zeros_like(expected)

    for step in range(FRAMES + CALLS):
        rows = [row for row in range(CALLS) if 0 <= step - row < FRAMES]
        frames = [step - row for row in rows]
        if rows:
            given = {"FRAME": calls[rows, frames], **{name: state[rows] for name, state in states.items()}}
            found[rows, frames] = _run(session, given, states, rows)

    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 0.1


def test_configurations_name_the_states(repository: Path) -> None:
    for rate in RATES:
        config = parse((repository / rate.model / "config.pbtxt").read_text())
        spec = to_sequence_spec(config)
        assert spec is not None
        assert [(state.input, state.dims) for state in spec.states] == _states(rate)


def _states(rate: Rate) -> list[tuple[str, tuple[int, ...]]]:
    return [("STATE", (2, 128)), ("CONTEXT", (rate.context,))]


def _run(
    session: onnxruntime.InferenceSession,
    given: dict[str, npt.NDArray[np.float32]],
    states: dict[str, npt.NDArray[np.float32]],
    rows: list[int],
) -> npt.NDArray[np.float32]:
    """Executes a batch, and keeps the states of its rows."""
    probability, state, context = session.run(["PROBABILITY", "STATE_OUT", "CONTEXT_OUT"], given)
    states["STATE"][rows], states["CONTEXT"][rows] = state, context
    return np.asarray(probability)[:, 0]

"""Python models that need a global resource, and record when they execute."""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.support.python_models import execute, write_model

NEEDS = "instance_group { kind: KIND_CPU rate_limiter { resources { name: 'g' count: 1 global: true } } }"

_RECORDING = """
for request in requests:
    begin = time.monotonic()
    if x(request).any():
        time.sleep(0.01)
        with open("%s", "a") as file:
            file.write(f"{begin} {time.monotonic()} {os.getppid()}\\n")
return [reply(x(request)) for request in requests]
"""
_CALLING = """
responses = []
for request in requests:
    call = pb_utils.InferenceRequest(
        model_name="%s", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x(request))])
    response = call.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    responses.append(pb_utils.InferenceResponse(response.output_tensors()))
return responses
"""


class Interval(NamedTuple):
    """An execution, on the monotonic clock of this machine."""

    begin_s: float
    end_s: float
    worker: str


def write_recording(repository: Path, name: str, log: Path) -> None:
    """Writes a model that answers with its input, and notes its executions in a file; warm-up runs have zeros."""
    write_model(repository, execute(_RECORDING % log), name, dims="1", max_batch_size=1, more=NEEDS)


def write_calling(repository: Path, name: str, callee: str) -> None:
    """Writes a model that needs the same, and answers with what another model answers."""
    write_model(repository, execute(_CALLING % callee), name, dims="1", max_batch_size=1, more=NEEDS)


def intervals(log: Path) -> list[Interval]:
    """Returns the executions that were noted, in order."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted(Interval(float(begin), float(end), worker) for begin, end, worker in map(str.split, lines))


def overlaps(found: list[Interval]) -> list[tuple[Interval, Interval]]:
    """Returns the executions that began before the one before them had ended."""
    return [(one, other) for one, other in pairwise(found) if other.begin_s < one.end_s]

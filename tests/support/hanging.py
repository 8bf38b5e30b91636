"""Models that hang: `model.py` files, and real worker processes with the faulty backend."""

from pathlib import Path

from qinfer.core.messages import Response
from qinfer.tensors import to_numpy
from tests.support.faulty_backend import write_model as write_faulty
from tests.support.python_models import execute
from tests.support.python_models import write_model as write_python

HANG = 666.0
"""A model of `write_hanging` never answers a batch with this value."""

HANGS = "if any((x(request) == 666).any() for request in requests): time.sleep(10**6)\n"
ECHO = HANGS + "return [reply(x(request)) for request in requests]"


def outcome(response: Response) -> object:
    """Returns the value of a response, or its error."""
    return response.failure.message if response.failure else to_numpy(response.outputs[0]).item()


def limit(seconds: float, name: str = "execute") -> str:
    """Returns the parameter of a limit."""
    return f'parameters {{ key: "qinfer.{name}_timeout_s" value {{ string_value: "{seconds:g}" }} }}'


def write_hanging(repository: Path, seconds: float, name: str = "hang", body: str = ECHO, **options: object) -> Path:
    """Writes a python model with a limit; returns the directory of its version."""
    more = f"{limit(seconds)} {options.pop('more', '')}"
    return write_python(repository, execute(body), name, **{"dims": 1, "delay_us": 50_000, "more": more, **options})


def write_stuck(repository: Path, seconds: float, hold_s: float = 600.0) -> Path:
    """Writes a model of the faulty backend with a limit, which waits for `hold_s`; returns its trace."""
    return write_faulty(repository, hold_s=hold_s, delay_us=100_000, beside=limit(seconds))

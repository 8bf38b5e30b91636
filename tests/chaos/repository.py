"""The models of a run: `sum = a + b`, once in no time and once in a while that a kill can fall into."""

from pathlib import Path

from onnx import helper

from tests.chaos.load import FAST, SLOW
from tests.support import models
from tests.support.hanging import limit
from tests.support.python_models import execute

_STUB = """
name: "{name}" backend: "{backend}" max_batch_size: {max_batch_size}
input {{ name: "a" data_type: TYPE_FP32 dims: [ {dim} ] }}
input {{ name: "b" data_type: TYPE_FP32 dims: [ {dim} ] }}
output {{ name: "sum" data_type: TYPE_FP32 dims: [ {dim} ] }}
dynamic_batching {{ {batching} }}
parameters {{ key: "mode" value {{ string_value: "add" }} }}
parameters {{ key: "delay_s" value {{ string_value: "{delay_s}" }} }}
{more}
"""
_HANGING = """
try:
    len(requests) > 1 and os.unlink("{mark}")
except FileNotFoundError:
    pass
else:
    len(requests) > 1 and time.sleep(10**6)
return [reply(x(request, "a") + x(request, "b"), "sum") for request in requests]
"""


def write_models(repository: Path, delay_s: float = 0.3) -> tuple[str, str]:
    """Writes `fast` (ONNX) and `slow`; returns their names."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"])]
    models.write(repository, FAST, nodes, [("a", "FP32", (1,)), ("b", "FP32", (1,))], [("sum", "FP32", (1,))])
    write_stub(repository, SLOW, delay_s=delay_s, max_batch_size=4)
    return FAST, SLOW


def write_stub(repository: Path, name: str, **options: object) -> str:
    """Writes a model whose executions last `delay_s` seconds; `batching` and `more` are parts of its configuration."""
    fields: dict[str, object] = {"max_batch_size": 8, "dim": 1, "batching": "", "more": "", "delay_s": 0.1, **options}
    fields.setdefault("backend", "stub")
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "1" / "model.stub").touch()
    (repository / name / "config.pbtxt").write_text(_STUB.format(name=name, **fields))
    return name


def write_hanging(repository: Path, name: str, limit_s: float, mark: Path) -> str:
    """Writes a model that hangs in a batch of several requests where there is a file `mark`, which it removes first."""
    batching = "max_queue_delay_microseconds: 200000"
    write_stub(repository, name, backend="python", batching=batching, more=limit(limit_s))
    (repository / name / "1" / "model.stub").unlink()
    (repository / name / "1" / "model.py").write_text(execute(_HANGING.format(mark=mark)))
    return name

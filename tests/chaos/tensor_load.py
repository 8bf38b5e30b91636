"""Callers that send large tensors, and check that each answer is the checksum of their own, or their own.

A checksum depends on every number and on its place: a tensor that is torn, or partly another's, has another one.
"""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
from onnx import helper

from tests.chaos.verdict import Verdict
from tests.support import models
from tests.support.ensembles import ensemble
from tests.support.python_models import execute, write_model

DIGEST, LONG, SAME, STEPS = "digest", "long", "same", "steps"
WAYS = ("memory", "no_memory", "old_worker", "unreachable")

_CALLERS = 8
_LEAST_BYTES, _MOST_BYTES = 1024, 8 * 2**20
_HUGE_BYTES, _HUGE = 60 * 2**20, 0.02
_PAUSE_S = 0.05
_AGAIN_S = 0.1
_PATIENCE_S = 60.0
"""Far more than leases and restarts can take."""
_RETRYABLE = {429, 503}
_SHOWN = 20
_LENGTH = "Inference-Header-Content-Length"

_LONG = execute(
    """
time.sleep(0.3)
return [reply(x(request).cumsum(axis=1).sum(axis=1, keepdims=True)) for request in requests]
"""
)


def write_models(repository: Path) -> tuple[str, ...]:
    """Writes a model that is done at once, one that takes a while that a fault can fall into, and an ensemble of it.

    Returns the names, the ensemble's last.
    """
    nodes = [
        helper.make_node("Constant", [], ["axis"], value_ints=[1]),
        helper.make_node("Constant", [], ["along"], value_int=1),
        helper.make_node("CumSum", ["x", "along"], ["sums"]),
        helper.make_node("ReduceSum", ["sums", "axis"], ["y"], keepdims=1),
    ]
    models.write(repository, DIGEST, nodes, [("x", "INT64", (-1,))], [("y", "INT64", (1,))])
    write_model(repository, _LONG, LONG, max_batch_size=4, datatype="INT64")
    same = [helper.make_node("Identity", ["x"], ["y"])]
    models.write(repository, SAME, same, [("x", "INT64", (-1,))], [("y", "INT64", (-1,))])
    steps = (SAME, {"x": "x"}, {"y": "t"}), (LONG, {"x": "t"}, {"y": "y"})
    ensemble(repository, STEPS, *steps, width=-1, max_batch_size=4)
    file = repository / STEPS / "config.pbtxt"
    file.write_text(file.read_text().replace("FP32", "INT64"))
    return DIGEST, LONG, SAME, STEPS


def tensor_of(seed: int, nbytes: int) -> npt.NDArray[np.int64]:
    """Returns the tensor of a request, in one row; ONNX Runtime adds as doubles, which have its checksum exactly."""
    return np.random.default_rng(seed).integers(0, 256, (1, max(nbytes // 8, 1)))


def checksum(tensor: npt.NDArray[np.int64]) -> int:
    """Returns the right answer."""
    return int(tensor.cumsum(axis=1).sum())


class TensorClients:
    """See the module docstring.

    Attributes:
        right: Answers that were right, by model.
        refusals: Why requests were refused or broke off, each of which may be repeated.
        problems: What may never happen.
    """

    def __init__(self, urls: Sequence[str], seed: int) -> None:
        self._urls = urls
        self._draw = random.Random(seed)
        self._is_over = asyncio.Event()
        self._numbers = iter(range(1, 10**9))
        self.right, self.refusals = Counter[str](), Counter[str]()
        self.problems: list[str] = []

    async def run(self) -> None:
        """Asks until `stop`."""
        async with httpx.AsyncClient(timeout=_PATIENCE_S) as client, asyncio.TaskGroup() as group:
            for _ in range(_CALLERS):
                group.create_task(self._ask_on(client))

    def stop(self) -> None:
        """Lets no new request begin."""
        self._is_over.set()

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        while not self._is_over.is_set():
            number = next(self._numbers)
            is_huge = self._draw.random() < _HUGE
            least, most = (_MOST_BYTES, _HUGE_BYTES) if is_huge else (_LEAST_BYTES, _MOST_BYTES)
            nbytes = int(math.exp(self._draw.uniform(math.log(least), math.log(most))))
            model = self._draw.choices([DIGEST, LONG, STEPS, SAME], [5, 2, 3, 0 if is_huge else 2])[0]
            await self._ask(client, number, model, tensor_of(number, nbytes))
            await asyncio.sleep(_PAUSE_S * self._draw.uniform(0.5, 1.5))

    async def _ask(self, client: httpx.AsyncClient, number: int, model: str, tensor: npt.NDArray[np.int64]) -> None:
        """Asks until a gateway answers, or the load is over."""
        headers, body = request_of(tensor, is_binary=model == SAME)
        while True:
            url = f"{self._draw.choice(self._urls)}/v2/models/{model}/versions/1/infer"
            try:
                reply = await client.post(url, content=body, headers=headers)
            except httpx.ReadTimeout:
                self.problems.append(f"{number} ({len(body)} bytes) was not answered within {_PATIENCE_S} s")
                return
            except httpx.TransportError as error:
                self.refusals[type(error).__name__] += 1
            else:
                if reply.status_code == 200:
                    self._judge(number, model, reply, tensor)
                    return
                if reply.status_code not in _RETRYABLE:
                    self.problems.append(f"{number} was answered with {reply.status_code} {reply.text[:200]}")
                    return
                self.refusals[f"{reply.status_code} {reply.text[:60]}"] += 1
            if self._is_over.is_set():
                return
            await asyncio.sleep(_AGAIN_S)

    def _judge(self, number: int, model: str, reply: httpx.Response, tensor: npt.NDArray[np.int64]) -> None:
        if model == SAME:
            is_right = reply.content[int(reply.headers[_LENGTH]) :] == tensor.tobytes()
            found = [len(reply.content)]
        else:
            found = json.loads(reply.content)["outputs"][0]["data"]
            is_right = found == [checksum(tensor)]
        if is_right:
            self.right[model] += 1
        else:
            told = f"{number} ({model}, {tensor.nbytes} bytes)"
            self.problems.append(f"{told} has the answer {found} and not {checksum(tensor)}")


def request_of(tensor: npt.NDArray[np.int64], *, is_binary: bool) -> tuple[dict[str, str], bytes]:
    """Returns headers and body of a binary request, whose answer is binary, too, or JSON."""
    parameters = {"binary_data_size": tensor.nbytes}
    about = {"name": "x", "shape": list(tensor.shape), "datatype": "INT64", "parameters": parameters}
    wanted = {"name": "y", "parameters": {"binary_data": is_binary}}
    head = json.dumps({"inputs": [about], "outputs": [wanted]}).encode()
    return {_LENGTH: str(len(head))}, head + tensor.tobytes()


def judge(
    clients: TensorClients,
    *,
    ways: Counter[str],
    of_workers: Counter[str],
    held: Sequence[float],
    far: Counter[str] | None = None,
) -> Verdict:
    """Counts, and says what is wrong.

    Args:
        clients: What callers saw.
        ways: How many requests of gateways went which way.
        of_workers: And how many steps of ensembles.
        held: The bytes that each process holds in the end.
        far: How many tensors and replies travelled between machines; `None` = there is one machine.
    """
    wrong = sum("has the answer" in problem for problem in clients.problems)
    counts = [f"right={sum(clients.right.values())} wrong={wrong}", *(f"{w}={ways[w]}+{of_workers[w]}" for w in WAYS)]
    problems = clients.problems[:_SHOWN]
    used = {"request was kept in memory": ways["memory"], "step was kept in memory": of_workers["memory"]}
    if far is not None:
        counts += [f"{name}={far[name]}" for name in ("fetched", "replied")]
        used |= {"tensor was fetched": far["fetched"], "reply was sent between machines": far["replied"]}
        used["tensor was read on its machine"] = near(ways, of_workers, far)
    problems += [f"no {name}" for name, count in used.items() if count <= 0]
    problems += [f"a process still holds {nbytes:.0f} bytes" for nbytes in held if nbytes]
    return Verdict(f"tensors: {' '.join(counts)}", problems)


def near(ways: Counter[str], of_workers: Counter[str], far: Counter[str]) -> int:
    """Returns how many tensors in memory were not fetched by another machine, at least."""
    return ways["memory"] + of_workers["memory"] - far["fetched"]

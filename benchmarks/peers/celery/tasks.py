"""The Celery application: one task that runs the model, over its own Redis."""

import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init, worker_ready

from benchmarks.peers import kserve

REDIS_URL = os.environ["BENCH_REDIS_URL"]

app = Celery("bench", broker=REDIS_URL, backend=REDIS_URL)
app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"], result_expires=60)

_models: list[kserve.Model] = []


@worker_ready.connect
@worker_process_init.connect
def load(**_: Any) -> None:
    if not _models:
        _models.append(kserve.Model())


@app.task
def infer(request: dict[str, Any]) -> dict[str, Any]:
    return kserve.answer(_models[0].run(kserve.read_tensor(request)))

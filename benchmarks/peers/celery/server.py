"""FastAPI + Celery + Redis: the gateway sends a task and waits for it with `.get()`, in FastAPI's thread pool."""

import orjson
import uvicorn
from fastapi import Depends, FastAPI, Request, Response

from benchmarks.peers import kserve
from benchmarks.peers.celery import tasks

app = FastAPI()


async def read_body(request: Request) -> bytes:
    return await request.body()


@app.post(kserve.INFER_PATH)
def infer(body: bytes = Depends(read_body)) -> Response:
    result = tasks.infer.delay(orjson.loads(body))
    return Response(orjson.dumps(result.get(timeout=30)), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=kserve.PORT, access_log=False, log_level="warning")

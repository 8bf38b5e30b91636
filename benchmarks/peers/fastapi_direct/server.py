"""FastAPI `async def` calling ONNX Runtime directly: no queue and no batching, the least that can be done.

`BENCH_JSON=stock` leaves reading and writing to FastAPI's own JSON (Python's `json`), without a pydantic model, which
would cost more; `orjson` replaces it.
"""

import os

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from benchmarks.peers import kserve

app = FastAPI()
model = kserve.Model()


async def infer(request: Request) -> Response:
    return JSONResponse(kserve.answer(model.run(kserve.read_tensor(await request.json()))))


async def infer_orjson(request: Request) -> Response:
    y = model.run(kserve.parse(await request.body()))
    return Response(kserve.render(y), media_type="application/json")


app.post(kserve.INFER_PATH)(infer_orjson if os.environ["BENCH_JSON"] == "orjson" else infer)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=kserve.PORT, access_log=False, log_level="warning")

"""FastAPI `async def` calling ONNX Runtime directly: no queue and no batching, the least that can be done.

The body is read and written with orjson rather than through a pydantic model: the quickest form of it.
"""

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.peers import kserve

app = FastAPI()
model = kserve.Model()


@app.post(kserve.INFER_PATH)
async def infer(request: Request) -> Response:
    y = model.run(kserve.parse(await request.body()))
    return Response(kserve.render(y), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=kserve.PORT, access_log=False, log_level="warning")

"""A page that shows what the model `writer` writes, and the server of it: run it as `uvicorn page:app --port 8080`.

The browser asks this server, which asks qinfer: the page needs no key, and no other origin.
"""

from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse

URL = "http://127.0.0.1:8000"
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>writer</title>
<form><input name="prompt" value="Alice was" autofocus> <button>Write</button></form>
<p></p>
<script>
const text = document.querySelector("p");
document.querySelector("form").onsubmit = async (event) => {
  event.preventDefault();
  const prompt = new FormData(event.target).get("prompt");
  text.textContent = prompt;
  const reply = await fetch("/write?prompt=" + encodeURIComponent(prompt));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let piece; !(piece = await reader.read()).done;) {
    const events = (rest + piece.value).split("\\n\\n");
    rest = events.pop();
    for (const one of events) {
      const message = JSON.parse(one.slice("data: ".length));
      text.textContent += message.text ?? " [" + message.error + "]";
    }
  }
};
</script>
"""

app = FastAPI()


@app.get("/")
def page() -> HTMLResponse:
    """Returns the page."""
    return HTMLResponse(PAGE)


@app.get("/write")
def write(prompt: str) -> StreamingResponse:
    """Passes on the events of the model; when the browser leaves, the request is cancelled."""

    async def events() -> AsyncIterator[bytes]:
        path = f"{URL}/v2/models/writer/generate_stream"
        strict = {"accept": "text/event-stream;strict=true"}  # browsers read no NaN
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", path, json={"prompt": prompt}, headers=strict) as reply,
        ):
            async for piece in reply.aiter_raw():
                yield piece

    return StreamingResponse(events(), media_type="text/event-stream")

// What a page of another origin gets from a gateway; `blocked` where the browser lets it neither send nor read.
async ({ url, key, body }) => {
  const call = async (path, options) => {
    try {
      const reply = await fetch(url + path, options);
      return { status: reply.status, reply, bytes: new Uint8Array(await reply.arrayBuffer()) };
    } catch (error) {
      return { status: "blocked" };
    }
  };
  const json = (bytes) => JSON.parse(new TextDecoder().decode(bytes));
  const post = (more, content = body) => ({
    method: "POST",
    headers: { "content-type": "application/json", "x-api-key": key, ...more },
    body: JSON.stringify(content),
  });

  const plain = await call("/v2/models/echo/infer", post());
  if (plain.status === "blocked") return { plain: plain.status, health: (await call("/v2/health/live")).status };
  const binary = await call("/v2/models/echo/infer", post({}, { ...body, parameters: { binary_data_output: true } }));
  const { Gateway } = await import("/gateway.mjs");
  const x = { name: "x", shape: [1, 4], datatype: "FP32" };
  const numbers = await new Gateway(url, key).inferBinary("echo", x, Float32Array.of(1, 2, 3, 4), "y");
  const length = Number(binary.reply.headers.get("inference-header-content-length"));
  const busy = await call("/v2/models/loading/infer", post());
  const accepted = await call("/v1/models/echo/requests", post({ "idempotency-key": "1" }));
  const result = await call(accepted.reply.headers.get("location") + "/result?wait=10", { headers: { "x-api-key": key } });
  return {
    plain: json(plain.bytes).outputs[0].data,
    binary: [...new Float32Array(binary.bytes.slice(length).buffer)],
    module: [...numbers],
    refused: json((await call("/v2/models/echo/infer", post({ "x-api-key": "wrong" }))).bytes).error,
    busy: [busy.status, Number(busy.reply.headers.get("retry-after")) >= 1],
    result: json(result.bytes).outputs[0].data,
    cancelled: (await call("/v1/requests/nothing", { method: "DELETE", headers: { "x-api-key": key } })).status,
    other: (await call("/v2/models/echo/infer", post({ "x-unknown": "1" }))).status,
  };
}

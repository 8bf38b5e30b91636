// Asks a qinfer gateway over HTTP: now, as JSON and as binary tensors, and later. The model is that of examples/digits.py.
//
//     node http.mjs http://127.0.0.1:8000
//
// Where the gateway asks for an API key, QINFER_API_KEY has it.
import { Gateway, Refusal } from "./gateway.mjs";

const labelOf = (response) => response.outputs.find((output) => output.name === "label").data[0];

async function main(url) {
  const gateway = new Gateway(url, process.env.QINFER_API_KEY);
  await gateway.call("/v2/health/ready");
  console.log("ready");

  const model = await gateway.metadata("digits");
  console.log("model:", model.name, model.versions[0], model.inputs[0].name, model.inputs[0].datatype);

  const pixels = Float32Array.from({ length: 64 }, (_, position) => position % 17);
  const image = { name: "image", shape: [1, 64], datatype: "FP32" };
  const inputs = [{ ...image, data: [...pixels] }];
  console.log("JSON:", labelOf(await gateway.inferJson("digits", inputs)));

  const probabilities = await gateway.inferBinary("digits", image, pixels, "probabilities");
  console.log("binary:", probabilities.indexOf(Math.max(...probabilities)));

  const path = await gateway.submit("digits", inputs, crypto.randomUUID());
  console.log("submitted:", labelOf(await gateway.result(path)));

  try {
    await gateway.inferJson("nothing", inputs);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    console.log("refused:", error.status, error.message);
  }
}

await main(process.argv[2]);

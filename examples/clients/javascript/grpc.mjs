// Asks a qinfer gateway over gRPC. The model is that of examples/digits.py.
//
//     npm install
//     node grpc.mjs 127.0.0.1:8001
//
// Where the gateway asks for an API key, QINFER_API_KEY has it.
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const SERVICE = "inference.GRPCInferenceService";
const PROTO = fileURLToPath(new URL("../inference.proto", import.meta.url));

// A gateway that is busy says when to try again (grpc-retry-pushback-ms), and the library waits that long.
const RETRIES = {
  methodConfig: [
    {
      name: [{ service: SERVICE }],
      timeout: "60s",
      retryPolicy: {
        maxAttempts: 5,
        initialBackoff: "0.5s",
        maxBackoff: "5s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE"],
      },
    },
  ],
};

/** Returns the calls of a gateway, each of which takes a message and returns a promise of another. */
export function connect(target, key) {
  const { inference } = grpc.loadPackageDefinition(loader.loadSync(PROTO, { keepCase: true, longs: Number }));
  const client = new inference.GRPCInferenceService(target, grpc.credentials.createInsecure(), {
    "grpc.service_config": JSON.stringify(RETRIES),
    "grpc.max_receive_message_length": -1,
  });
  const metadata = new grpc.Metadata();
  if (key) metadata.set("authorization", `Bearer ${key}`);
  const call = (name) => (message) => promisify(client[name].bind(client))(message, metadata);
  return {
    ready: call("ServerReady"),
    metadata: call("ModelMetadata"),
    infer: call("ModelInfer"),
    close: () => client.close(),
  };
}

function request(model, numbers) {
  return {
    model_name: model,
    inputs: [{ name: "image", datatype: "FP32", shape: [1, 64] }],
    outputs: [{ name: "probabilities" }],
    raw_input_contents: [Buffer.from(numbers.buffer)],
  };
}

function numbersOf(raw) {
  return Float32Array.from({ length: raw.length / 4 }, (_, position) => raw.readFloatLE(4 * position));
}

async function main(target) {
  const gateway = connect(target, process.env.QINFER_API_KEY);
  const { ready } = await gateway.ready({});
  console.log(ready ? "ready" : "not ready");

  const model = await gateway.metadata({ name: "digits" });
  console.log("model:", model.name, model.versions[0], model.inputs[0].name, model.inputs[0].datatype);

  const pixels = Float32Array.from({ length: 64 }, (_, position) => position % 17);
  for (let turn = 0; turn < 2; turn++) {
    const response = await gateway.infer(request("digits", pixels));
    const probabilities = numbersOf(response.raw_output_contents[0]);
    console.log("binary:", probabilities.indexOf(Math.max(...probabilities)));
  }

  try {
    await gateway.infer(request("nothing", pixels));
  } catch (error) {
    console.log("refused:", grpc.status[error.code], error.details);
  }
  gateway.close();
}

await main(process.argv[2]);

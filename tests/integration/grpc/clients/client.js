// Makes calls to a gateway with @grpc/grpc-js and prints what came back as one JSON object.
// Arguments: file with the descriptors, target, file with the certificate to trust ("" = no TLS).
const [descriptors, target, certificate] = process.argv.slice(2);
const fs = require("fs");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const options = { keepCase: true, enums: Number };
const services = grpc.loadPackageDefinition(loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors), options));
const credentials = certificate
  ? grpc.credentials.createSsl(fs.readFileSync(certificate))
  : grpc.credentials.createInsecure();
const unlimited = { "grpc.max_receive_message_length": -1 };
const inference = new services.inference.GRPCInferenceService(target, credentials, unlimited);
const health = new services.grpc.health.v1.Health(target, credentials);

function request(model, value, count = 4) {
  const row = Buffer.alloc(4 * count);
  for (let i = 0; i < count; i++) row.writeFloatLE(value * (i + 1), 4 * i);
  return {
    model_name: model,
    inputs: [{ name: "x", datatype: "FP32", shape: [1, count] }],
    raw_input_contents: [row],
  };
}

function values(reply) {
  const raw = reply.raw_output_contents[0];
  return Array.from({ length: raw.length / 4 }, (_, i) => raw.readFloatLE(4 * i));
}

function call(method, message, callOptions = {}) {
  return new Promise((resolve) => {
    inference[method](message, new grpc.Metadata(), callOptions, (error, reply) =>
      resolve(error ? { error: [error.code, error.details] } : { reply }),
    );
  });
}

async function stream(messages) {
  const found = [];
  const both = inference.ModelStreamInfer();
  both.on("data", (reply) => found.push(reply.error_message || values(reply.infer_response)[0]));
  both.on("error", () => {});
  const status = new Promise((resolve) => both.on("status", resolve));
  messages.forEach((message) => both.write(message));
  both.end();
  return { found, code: (await status).code };
}

function cancelled() {
  return new Promise((resolve) => {
    const pending = inference.ModelInfer(request("stuck", 1), (error) => resolve(error.code));
    setTimeout(() => pending.cancel(), 200);
  });
}

function watched() {
  return new Promise((resolve) => {
    const watch = health.Watch({ service: "" });
    watch.on("error", () => {});
    watch.on("data", (reply) => (watch.cancel(), resolve(reply.status)));
  });
}

async function main() {
  const numbers = Array.from({ length: 300 }, (_, i) => i);
  const many = await Promise.all(numbers.map((i) => call("ModelInfer", request("echo", i))));
  const large = await call("ModelInfer", request("wide", 1, 2 ** 21));
  console.log(
    JSON.stringify({
      live: (await call("ServerLive", {})).reply.live,
      values: values((await call("ModelInfer", request("echo", 2))).reply),
      many: many.every(({ reply }, i) => reply && values(reply)[0] === i),
      large: values(large.reply)[2 ** 21 - 1],
      unknown: (await call("ModelInfer", request("nothing", 1))).error,
      deadline: (await call("ModelInfer", request("stuck", 1), { deadline: Date.now() + 300 })).error[0],
      stream: await stream([...numbers.map((i) => request("echo", i)), request("nothing", 1)]),
      cancelled: await cancelled(),
      watched: await watched(),
    }),
  );
}

main().then(() => process.exit(0));

// A client of qinfer's HTTP, for browsers and for Node.js 18 or newer.

// NaN and Infinity are null then: JSON.parse refuses the words that the server writes by default, as Triton does.
const STRICT = "application/json;strict=true";

/** An answer with an error status. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** A gateway, and the key that it is shown. */
export class Gateway {
  constructor(url, key) {
    this.url = url;
    this.key = key;
  }

  /** Sends a request, and sends it again for as long as the gateway is busy, a minute at most. */
  async call(path, { headers = {}, ...options } = {}) {
    const authorization = this.key ? { authorization: `Bearer ${this.key}` } : {};
    const deadline = AbortSignal.timeout(60_000);
    for (;;) {
      const response = await fetch(this.url + path, {
        ...options,
        headers: { accept: STRICT, ...authorization, ...headers },
        signal: deadline,
      });
      if (response.ok) return response;
      const { error } = await response.json().catch(() => ({ error: response.statusText }));
      const seconds = Number(response.headers.get("retry-after"));
      if (!seconds || deadline.aborted) throw new Refusal(response.status, error);
      console.warn(`busy, again in ${seconds} s: ${response.status} ${error}`);
      await new Promise((resume) => setTimeout(resume, seconds * 1000));
    }
  }

  /** Returns the description of a model. */
  async metadata(model) {
    return (await this.call(`/v2/models/${model}`)).json();
  }

  /** Asks a model with numbers as text. */
  async inferJson(model, inputs) {
    const response = await this.call(`/v2/models/${model}/infer`, { method: "POST", body: JSON.stringify({ inputs }) });
    return response.json();
  }

  /** Asks a model with the raw numbers of one input, and returns those of its output: the fastest form. */
  async inferBinary(model, input, numbers, output) {
    const head = new TextEncoder().encode(
      JSON.stringify({
        inputs: [{ ...input, parameters: { binary_data_size: numbers.byteLength } }],
        outputs: [{ name: output, parameters: { binary_data: true } }],
      }),
    );
    const response = await this.call(`/v2/models/${model}/infer`, {
      method: "POST",
      headers: { "inference-header-content-length": String(head.length) },
      body: new Blob([head, numbers]),
    });
    const length = Number(response.headers.get("inference-header-content-length"));
    return new Float32Array((await response.arrayBuffer()).slice(length)); // the only binary output
  }

  /** Has a request queued, and returns the path of it; with the same key it is queued once, however often it is sent. */
  async submit(model, inputs, key) {
    const response = await this.call(`/v1/models/${model}/requests`, {
      method: "POST",
      headers: { "idempotency-key": key },
      body: JSON.stringify({ inputs }),
    });
    return response.headers.get("location");
  }

  /** Waits for the result of a queued request. */
  async result(path) {
    for (;;) {
      const response = await this.call(`${path}/result?wait=30`);
      if (response.status === 200) return response.json();
    }
  }
}

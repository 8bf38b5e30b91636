import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.time.Duration;
import java.time.Instant;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.UUID;

/**
 * Asks a qinfer gateway over HTTP: now, as JSON and as binary tensors, and later. The model is that of examples/digits.py.
 *
 * <pre>java -cp '/usr/share/java/*' Client.java http://127.0.0.1:8000</pre>
 *
 * Where the gateway asks for an API key, QINFER_API_KEY has it. Needs Java 17 or newer, and Jackson, which pom.xml names.
 */
public final class Client {
    private static final String LENGTH = "Inference-Header-Content-Length";
    private static final ObjectMapper JSON = new ObjectMapper();

    // HTTP/2 needs TLS, and a gateway without TLS would be asked for it in vain.
    private final HttpClient http = HttpClient.newBuilder().version(HttpClient.Version.HTTP_1_1).build();
    private final String url;
    private final String key;

    /** Calls a gateway with a key; without one if it is null or empty. */
    public Client(String url, String key) {
        this.url = url;
        this.key = key;
    }

    /** An answer with an error status. */
    public static final class Refusal extends IOException {
        public final int status;

        Refusal(int status, String message) {
            super(message);
            this.status = status;
        }
    }

    /** Sends a request, and sends it again for as long as the gateway is busy, a minute at most. */
    public HttpResponse<byte[]> call(HttpRequest.Builder builder) throws IOException, InterruptedException {
        var deadline = Instant.now().plusSeconds(60);
        if (key != null && !key.isEmpty()) {
            builder.header("Authorization", "Bearer " + key);
        }
        var request = builder.timeout(Duration.ofSeconds(60)).build();
        while (true) {
            var response = http.send(request, BodyHandlers.ofByteArray());
            if (response.statusCode() < 400) {
                return response;
            }
            OptionalLong seconds = response.headers().firstValueAsLong("Retry-After");
            var refusal = new Refusal(response.statusCode(), errorIn(response.body()));
            if (seconds.isEmpty() || Instant.now().plusSeconds(seconds.getAsLong()).isAfter(deadline)) {
                throw refusal;
            }
            System.err.printf("busy, again in %d s: %d %s%n", seconds.getAsLong(), refusal.status, refusal.getMessage());
            Thread.sleep(seconds.getAsLong() * 1000);
        }
    }

    /** Returns the description of a model. */
    public JsonNode metadata(String model) throws IOException, InterruptedException {
        return JSON.readTree(call(to("/v2/models/" + model).GET()).body());
    }

    /** Asks a model with numbers as text. */
    public JsonNode inferJson(String model, Object inputs) throws IOException, InterruptedException {
        var body = JSON.writeValueAsBytes(Map.of("inputs", inputs));
        return JSON.readTree(call(to("/v2/models/" + model + "/infer").POST(BodyPublishers.ofByteArray(body))).body());
    }

    /** Asks a model with the raw numbers of its input, and returns those of an output: the fastest form. */
    public float[] inferBinary(String model, String input, int[] shape, float[] numbers, String output)
            throws IOException, InterruptedException {
        var raw = ByteBuffer.allocate(4 * numbers.length).order(ByteOrder.LITTLE_ENDIAN);
        raw.asFloatBuffer().put(numbers);
        var size = Map.of("binary_data_size", raw.capacity());
        var head = JSON.writeValueAsBytes(Map.of(
                "inputs", List.of(Map.of("name", input, "shape", shape, "datatype", "FP32", "parameters", size)),
                "outputs", List.of(Map.of("name", output, "parameters", Map.of("binary_data", true)))));
        var response = call(to("/v2/models/" + model + "/infer")
                .header(LENGTH, String.valueOf(head.length))
                .POST(BodyPublishers.ofByteArrays(List.of(head, raw.array()))));
        var length = (int) response.headers().firstValueAsLong(LENGTH).orElseThrow();
        var rest = ByteBuffer.wrap(response.body()).position(length).slice().order(ByteOrder.LITTLE_ENDIAN);
        var found = new float[rest.capacity() / 4]; // the only binary output
        rest.asFloatBuffer().get(found);
        return found;
    }

    /** Has a request queued, and returns the path of it; with the same key it is queued once, however often it is sent. */
    public String submit(String model, Object inputs, String idempotencyKey) throws IOException, InterruptedException {
        var body = JSON.writeValueAsBytes(Map.of("inputs", inputs));
        var request = to("/v1/models/" + model + "/requests")
                .header("Idempotency-Key", idempotencyKey)
                .POST(BodyPublishers.ofByteArray(body));
        return call(request).headers().firstValue("Location").orElseThrow();
    }

    /** Waits for the result of a queued request. */
    public JsonNode result(String path) throws IOException, InterruptedException {
        while (true) {
            var response = call(to(path + "/result?wait=30").GET());
            if (response.statusCode() == 200) {
                return JSON.readTree(response.body());
            }
        }
    }

    private HttpRequest.Builder to(String path) {
        return HttpRequest.newBuilder(URI.create(url + path));
    }

    private static String errorIn(byte[] body) {
        try {
            return JSON.readTree(body).path("error").asText();
        } catch (IOException error) {
            return new String(body); // a proxy's answer need not be JSON
        }
    }

    private static int labelOf(JsonNode response) {
        for (var output : response.get("outputs")) {
            if (output.get("name").asText().equals("label")) {
                return output.get("data").get(0).asInt();
            }
        }
        throw new IllegalStateException("no label in " + response);
    }

    private static int largest(float[] numbers) {
        var found = 0;
        for (var position = 0; position < numbers.length; position++) {
            found = numbers[position] > numbers[found] ? position : found;
        }
        return found;
    }

    public static void main(String[] arguments) throws IOException, InterruptedException {
        var gateway = new Client(arguments[0], System.getenv("QINFER_API_KEY"));
        gateway.call(gateway.to("/v2/health/ready").GET());
        System.out.println("ready");

        var model = gateway.metadata("digits");
        var input = model.get("inputs").get(0);
        System.out.printf("model: %s %s %s %s%n", model.get("name").asText(), model.get("versions").get(0).asText(),
                input.get("name").asText(), input.get("datatype").asText());

        var pixels = new float[64];
        for (var position = 0; position < pixels.length; position++) {
            pixels[position] = position % 17;
        }
        var shape = new int[] {1, 64};
        var inputs = List.of(Map.of("name", "image", "shape", shape, "datatype", "FP32", "data", pixels));
        System.out.println("JSON: " + labelOf(gateway.inferJson("digits", inputs)));
        System.out.println("binary: " + largest(gateway.inferBinary("digits", "image", shape, pixels, "probabilities")));

        var path = gateway.submit("digits", inputs, UUID.randomUUID().toString());
        System.out.println("submitted: " + labelOf(gateway.result(path)));

        try {
            gateway.inferJson("nothing", inputs);
        } catch (Refusal refusal) {
            System.out.println("refused: " + refusal.status + " " + refusal.getMessage());
        }
    }
}

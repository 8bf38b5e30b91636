// Asks a qinfer gateway over HTTP: now, as JSON and as binary tensors, and later. The model is that of examples/digits.py.
//
//	go run ./http http://127.0.0.1:8000
//
// Where the gateway asks for an API key, QINFER_API_KEY has it. Go's standard library is enough.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"time"
)

const lengthHeader = "Inference-Header-Content-Length"

// Tensor is an input, an output, or an output that is wanted; binary ones have their bytes behind the JSON.
type Tensor struct {
	Name       string         `json:"name"`
	Shape      []int          `json:"shape,omitempty"`
	Datatype   string         `json:"datatype,omitempty"`
	Parameters map[string]any `json:"parameters,omitempty"`
	Data       []float64      `json:"data,omitempty"`
}

// Message is a request to a model, or its response.
type Message struct {
	Inputs  []Tensor `json:"inputs,omitempty"`
	Outputs []Tensor `json:"outputs,omitempty"`
}

// Metadata describes a model.
type Metadata struct {
	Name     string   `json:"name"`
	Versions []string `json:"versions"`
	Inputs   []Tensor `json:"inputs"`
}

// Refusal is an answer with an error status.
type Refusal struct {
	Status  int    `json:"-"`
	Message string `json:"error"`
}

func (refusal *Refusal) Error() string { return fmt.Sprintf("%d %s", refusal.Status, refusal.Message) }

// Gateway is a gateway, and the key that it is shown.
type Gateway struct{ URL, Key string }

// Call sends a request, and sends it again for as long as the gateway is busy and the context lasts.
func (gateway Gateway) Call(
	ctx context.Context, method, path string, header http.Header, body []byte,
) (*http.Response, []byte, error) {
	for {
		request, err := http.NewRequestWithContext(ctx, method, gateway.URL+path, bytes.NewReader(body))
		if err != nil {
			return nil, nil, err
		}
		for name, values := range header {
			request.Header[name] = values
		}
		if gateway.Key != "" {
			request.Header.Set("Authorization", "Bearer "+gateway.Key)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return nil, nil, err
		}
		content, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode < 400 {
			return response, content, err
		}
		refusal := &Refusal{Status: response.StatusCode}
		_ = json.Unmarshal(content, refusal) // a proxy's answer need not be JSON
		seconds, err := strconv.Atoi(response.Header.Get("Retry-After"))
		if err != nil {
			return nil, nil, refusal
		}
		log.Printf("busy, again in %d s: %v", seconds, refusal)
		select {
		case <-time.After(time.Duration(seconds) * time.Second):
		case <-ctx.Done():
			return nil, nil, refusal
		}
	}
}

// Metadata returns the description of a model.
func (gateway Gateway) Metadata(ctx context.Context, model string) (found Metadata, err error) {
	_, content, err := gateway.Call(ctx, "GET", "/v2/models/"+model, nil, nil)
	if err == nil {
		err = json.Unmarshal(content, &found)
	}
	return found, err
}

// InferJSON asks a model with numbers as text.
func (gateway Gateway) InferJSON(ctx context.Context, model string, request Message) (found Message, err error) {
	body, err := json.Marshal(request)
	if err != nil {
		return found, err
	}
	_, content, err := gateway.Call(ctx, "POST", "/v2/models/"+model+"/infer", nil, body)
	if err == nil {
		err = json.Unmarshal(content, &found)
	}
	return found, err
}

// InferBinary asks a model with the raw numbers of one input, and returns those of its output: the fastest form.
func (gateway Gateway) InferBinary(
	ctx context.Context, model string, input Tensor, numbers []float32, output string,
) ([]float32, error) {
	var raw bytes.Buffer
	_ = binary.Write(&raw, binary.LittleEndian, numbers)
	input.Parameters = map[string]any{"binary_data_size": raw.Len()}
	wanted := Tensor{Name: output, Parameters: map[string]any{"binary_data": true}}
	head, err := json.Marshal(Message{Inputs: []Tensor{input}, Outputs: []Tensor{wanted}})
	if err != nil {
		return nil, err
	}
	header := http.Header{lengthHeader: {strconv.Itoa(len(head))}}
	path := "/v2/models/" + model + "/infer"
	response, content, err := gateway.Call(ctx, "POST", path, header, append(head, raw.Bytes()...))
	if err != nil {
		return nil, err
	}
	length, err := strconv.Atoi(response.Header.Get(lengthHeader))
	if err != nil {
		return nil, err
	}
	found := make([]float32, (len(content)-length)/4) // the only binary output
	err = binary.Read(bytes.NewReader(content[length:]), binary.LittleEndian, found)
	return found, err
}

// Submit has a request queued, and returns the path of it; with the same key it is queued once, however often it is sent.
func (gateway Gateway) Submit(ctx context.Context, model string, request Message, key string) (string, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return "", err
	}
	header := http.Header{"Idempotency-Key": {key}}
	response, _, err := gateway.Call(ctx, "POST", "/v1/models/"+model+"/requests", header, body)
	if err != nil {
		return "", err
	}
	return response.Header.Get("Location"), nil
}

// Result waits for the result of a queued request.
func (gateway Gateway) Result(ctx context.Context, path string) (found Message, err error) {
	for {
		response, content, err := gateway.Call(ctx, "GET", path+"/result?wait=30", nil, nil)
		if err != nil {
			return found, err
		}
		if response.StatusCode == http.StatusOK {
			return found, json.Unmarshal(content, &found)
		}
	}
}

func run(ctx context.Context, gateway Gateway) error {
	if _, _, err := gateway.Call(ctx, "GET", "/v2/health/ready", nil, nil); err != nil {
		return err
	}
	fmt.Println("ready")

	model, err := gateway.Metadata(ctx, "digits")
	if err != nil {
		return err
	}
	fmt.Println("model:", model.Name, model.Versions[0], model.Inputs[0].Name, model.Inputs[0].Datatype)

	numbers, pixels := make([]float32, 64), make([]float64, 64)
	for position := range pixels {
		numbers[position], pixels[position] = float32(position%17), float64(position%17)
	}
	image := Tensor{Name: "image", Shape: []int{1, 64}, Datatype: "FP32"}
	request := Message{Inputs: []Tensor{image}}
	request.Inputs[0].Data = pixels

	response, err := gateway.InferJSON(ctx, model.Name, request)
	if err != nil {
		return err
	}
	fmt.Println("JSON:", labelOf(response))

	probabilities, err := gateway.InferBinary(ctx, model.Name, image, numbers, "probabilities")
	if err != nil {
		return err
	}
	fmt.Println("binary:", largest(probabilities))

	path, err := gateway.Submit(ctx, model.Name, request, fmt.Sprint(time.Now().UnixNano()))
	if err != nil {
		return err
	}
	response, err = gateway.Result(ctx, path)
	if err != nil {
		return err
	}
	fmt.Println("submitted:", labelOf(response))

	var refusal *Refusal
	if _, err = gateway.InferJSON(ctx, "nothing", request); errors.As(err, &refusal) {
		fmt.Println("refused:", refusal.Status, refusal.Message)
	}
	return nil
}

func labelOf(response Message) int {
	for _, output := range response.Outputs {
		if output.Name == "label" {
			return int(output.Data[0])
		}
	}
	return -1
}

func largest(numbers []float32) (found int) {
	for position, number := range numbers {
		if number > numbers[found] {
			found = position
		}
	}
	return found
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx, Gateway{URL: os.Args[1], Key: os.Getenv("QINFER_API_KEY")}); err != nil {
		log.Fatal(err)
	}
}

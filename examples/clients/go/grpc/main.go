// Asks a qinfer gateway over gRPC. The model is that of examples/digits.py.
//
//	protoc -I .. --go_out=. --go-grpc_out=. --go_opt=module=example.org/qinfer --go-grpc_opt=module=example.org/qinfer ../inference.proto
//	go mod tidy
//	go run ./grpc 127.0.0.1:8001
//
// Where the gateway asks for an API key, QINFER_API_KEY has it.
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "example.org/qinfer/inference"
)

// A gateway that is busy says when to try again (grpc-retry-pushback-ms), and the library waits that long.
const retries = `{
  "methodConfig": [{
    "name": [{"service": "inference.GRPCInferenceService"}],
    "retryPolicy": {
      "maxAttempts": 5,
      "initialBackoff": "0.5s",
      "maxBackoff": "5s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

func request(model string, numbers []float32) *pb.ModelInferRequest {
	var raw bytes.Buffer
	_ = binary.Write(&raw, binary.LittleEndian, numbers)
	return &pb.ModelInferRequest{
		ModelName:        model,
		Inputs:           []*pb.ModelInferRequest_InferInputTensor{{Name: "image", Datatype: "FP32", Shape: []int64{1, 64}}},
		Outputs:          []*pb.ModelInferRequest_InferRequestedOutputTensor{{Name: "probabilities"}},
		RawInputContents: [][]byte{raw.Bytes()},
	}
}

func run(ctx context.Context, gateway pb.GRPCInferenceServiceClient) error {
	server, err := gateway.ServerReady(ctx, &pb.ServerReadyRequest{})
	if err != nil {
		return err
	}
	if server.Ready {
		fmt.Println("ready")
	}

	model, err := gateway.ModelMetadata(ctx, &pb.ModelMetadataRequest{Name: "digits"})
	if err != nil {
		return err
	}
	fmt.Println("model:", model.Name, model.Versions[0], model.Inputs[0].Name, model.Inputs[0].Datatype)

	pixels := make([]float32, 64)
	for position := range pixels {
		pixels[position] = float32(position % 17)
	}
	for turn := 0; turn < 2; turn++ {
		response, err := gateway.ModelInfer(ctx, request(model.Name, pixels))
		if err != nil {
			return err
		}
		probabilities := make([]float32, 10)
		raw := bytes.NewReader(response.RawOutputContents[0])
		if err := binary.Read(raw, binary.LittleEndian, probabilities); err != nil {
			return err
		}
		fmt.Println("binary:", largest(probabilities))
	}

	if _, err := gateway.ModelInfer(ctx, request("nothing", pixels)); err != nil {
		fmt.Println("refused:", status.Code(err), status.Convert(err).Message())
	}
	return nil
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
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure(), grpc.WithDefaultServiceConfig(retries))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if key := os.Getenv("QINFER_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+key)
	}
	if err := run(ctx, pb.NewGRPCInferenceServiceClient(connection)); err != nil {
		log.Fatal(err)
	}
}

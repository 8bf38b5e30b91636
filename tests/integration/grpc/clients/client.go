// Makes calls to a gateway with grpc-go and prints what came back as one JSON object.
// Arguments: target, file with the certificate to trust ("" = no TLS).
package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	pb "triton"
)

const largeCount = 1 << 21

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func request(model string, value float32, count int) *pb.ModelInferRequest {
	row := make([]byte, 4*count)
	for i := 0; i < count; i++ {
		binary.LittleEndian.PutUint32(row[4*i:], math.Float32bits(value*float32(i+1)))
	}
	input := &pb.ModelInferRequest_InferInputTensor{Name: "x", Datatype: "FP32", Shape: []int64{1, int64(count)}}
	return &pb.ModelInferRequest{
		ModelName: model, Inputs: []*pb.ModelInferRequest_InferInputTensor{input}, RawInputContents: [][]byte{row},
	}
}

func values(reply *pb.ModelInferResponse) []float32 {
	raw := reply.RawOutputContents[0]
	found := make([]float32, len(raw)/4)
	for i := range found {
		found[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return found
}

func infer(client pb.GRPCInferenceServiceClient, model string, value float32, count int) []float32 {
	reply, err := client.ModelInfer(context.Background(), request(model, value, count))
	check(err)
	return values(reply)
}

// code returns the number of the status of a call of a model that never answers.
func code(client pb.GRPCInferenceServiceClient, ctx context.Context) int {
	_, err := client.ModelInfer(ctx, request("stuck", 1, 4))
	return int(status.Code(err))
}

func many(client pb.GRPCInferenceServiceClient, count int) bool {
	right := make([]bool, count)
	var group sync.WaitGroup
	for i := 0; i < count; i++ {
		group.Add(1)
		go func(i int) {
			defer group.Done()
			right[i] = infer(client, "echo", float32(i), 4)[0] == float32(i)
		}(i)
	}
	group.Wait()
	for _, is := range right {
		if !is {
			return false
		}
	}
	return true
}

func stream(client pb.GRPCInferenceServiceClient, count int) map[string]interface{} {
	both, err := client.ModelStreamInfer(context.Background())
	check(err)
	go func() {
		for i := 0; i < count; i++ {
			check(both.Send(request("echo", float32(i), 4)))
		}
		check(both.Send(request("nothing", 1, 4)))
		check(both.CloseSend())
	}()
	found := []interface{}{}
	for {
		reply, err := both.Recv()
		if err == io.EOF {
			return map[string]interface{}{"found": found, "code": 0}
		}
		check(err)
		if reply.ErrorMessage != "" {
			found = append(found, reply.ErrorMessage)
		} else {
			found = append(found, values(reply.InferResponse)[0])
		}
	}
}

func main() {
	security := grpc.WithInsecure()
	if os.Args[2] != "" {
		trusted, err := credentials.NewClientTLSFromFile(os.Args[2], "")
		check(err)
		security = grpc.WithTransportCredentials(trusted)
	}
	large := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32))
	connection, err := grpc.Dial(os.Args[1], security, large)
	check(err)
	client := pb.NewGRPCInferenceServiceClient(connection)

	live, err := client.ServerLive(context.Background(), &pb.ServerLiveRequest{})
	check(err)
	_, unknown := client.ModelInfer(context.Background(), request("nothing", 1, 4))
	soon, stop := context.WithTimeout(context.Background(), 300*time.Millisecond)
	deadline := code(client, soon)
	stop()
	ending, cancel := context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	cancelled := code(client, ending)
	watch, err := grpc_health_v1.NewHealthClient(connection).Watch(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	check(err)
	watched, err := watch.Recv()
	check(err)

	check(json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"live":      live.Live,
		"values":    infer(client, "echo", 2, 4),
		"many":      many(client, 300),
		"large":     infer(client, "wide", 1, largeCount)[largeCount-1],
		"unknown":   []interface{}{int(status.Code(unknown)), status.Convert(unknown).Message()},
		"deadline":  deadline,
		"stream":    stream(client, 300),
		"cancelled": cancelled,
		"watched":   int(watched.Status),
	}))
}

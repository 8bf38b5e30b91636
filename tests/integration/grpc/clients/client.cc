// Makes calls to a gateway with gRPC's C++ library and prints what came back as one JSON object.
// Arguments: target, file with the certificate to trust ("" = no TLS).
#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "grpc_service.grpc.pb.h"
#include "grpc_health/v1/health.grpc.pb.h"

using grpc::ClientContext;
using grpc::Status;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

constexpr int kLarge = 1 << 21;
constexpr int kMany = 300;

ModelInferRequest Request(const std::string& model, float value, int count = 4) {
  std::vector<float> row(count);
  for (int i = 0; i < count; i++) row[i] = value * (i + 1);
  ModelInferRequest request;
  request.set_model_name(model);
  auto* input = request.add_inputs();
  input->set_name("x");
  input->set_datatype("FP32");
  input->add_shape(1);
  input->add_shape(count);
  request.add_raw_input_contents(row.data(), row.size() * sizeof(float));
  return request;
}

float Value(const ModelInferResponse& reply, int index = 0) {
  return reinterpret_cast<const float*>(reply.raw_output_contents(0).data())[index];
}

Status Infer(GRPCInferenceService::Stub& stub, const ModelInferRequest& request, ModelInferResponse* reply) {
  ClientContext context;
  return stub.ModelInfer(&context, request, reply);
}

bool InferMany(GRPCInferenceService::Stub& stub) {
  std::vector<char> right(kMany);
  std::vector<std::thread> threads;
  for (int i = 0; i < kMany; i++) {
    threads.emplace_back([&stub, &right, i] {
      ModelInferResponse reply;
      right[i] = Infer(stub, Request("echo", i), &reply).ok() && Value(reply) == i;
    });
  }
  for (auto& thread : threads) thread.join();
  return std::count(right.begin(), right.end(), 1) == kMany;
}

std::string Quoted(const std::string& text) { return '"' + text + '"'; }  // none of the texts needs an escape

std::string Stream(GRPCInferenceService::Stub& stub) {
  ClientContext context;
  auto both = stub.ModelStreamInfer(&context);
  std::thread writer([&both] {
    for (int i = 0; i < kMany; i++) both->Write(Request("echo", i));
    both->Write(Request("nothing", 1));
    both->WritesDone();
  });
  std::ostringstream out;
  inference::ModelStreamInferResponse reply;
  for (const char* comma = ""; both->Read(&reply); comma = ",") {
    out << comma;
    if (reply.error_message().empty()) {
      out << Value(reply.infer_response());
    } else {
      out << Quoted(reply.error_message());
    }
  }
  writer.join();
  return "{\"found\": [" + out.str() + "], \"code\": " + std::to_string(both->Finish().error_code()) + "}";
}

int main(int, char** argv) {
  auto credentials = grpc::InsecureChannelCredentials();
  if (*argv[2]) {
    std::ostringstream roots;
    roots << std::ifstream(argv[2]).rdbuf();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = roots.str();
    credentials = grpc::SslCredentials(options);
  }
  grpc::ChannelArguments unlimited;
  unlimited.SetMaxReceiveMessageSize(-1);
  auto channel = grpc::CreateCustomChannel(argv[1], credentials, unlimited);
  auto stub = *GRPCInferenceService::NewStub(channel);

  inference::ServerLiveResponse live;
  ClientContext live_context;
  stub.ServerLive(&live_context, {}, &live);

  ModelInferResponse reply, large, none;
  Infer(stub, Request("echo", 2), &reply);
  Infer(stub, Request("wide", 1, kLarge), &large);
  const Status unknown = Infer(stub, Request("nothing", 1), &none);

  ClientContext soon;
  soon.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  const Status deadline = stub.ModelInfer(&soon, Request("stuck", 1), &none);

  ClientContext ending;
  std::thread canceller([&ending] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ending.TryCancel();
  });
  const Status cancelled = stub.ModelInfer(&ending, Request("stuck", 1), &none);
  canceller.join();

  ClientContext watching;
  grpc::health::v1::HealthCheckResponse watched;
  auto health = grpc::health::v1::Health::NewStub(channel);
  auto watch = health->Watch(&watching, {});
  watch->Read(&watched);
  watching.TryCancel();

  std::cout << "{\"live\": " << (live.live() ? "true" : "false") << ", \"values\": [" << Value(reply, 0) << ","
            << Value(reply, 1) << "," << Value(reply, 2) << "," << Value(reply, 3)
            << "], \"many\": " << (InferMany(stub) ? "true" : "false") << ", \"large\": " << long(Value(large, kLarge - 1))
            << ", \"unknown\": [" << unknown.error_code() << "," << Quoted(unknown.error_message())
            << "], \"deadline\": " << deadline.error_code() << ", \"stream\": " << Stream(stub)
            << ", \"cancelled\": " << cancelled.error_code() << ", \"watched\": " << watched.status() << "}\n";
}

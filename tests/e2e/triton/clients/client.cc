// Calls a whole server with gRPC's C++ library: tensors of every form, sequences, errors within streams.
// Prints what came back as lines `name: value value …`; the argument is the target.
#include <iostream>
#include <sstream>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "grpc_service.grpc.pb.h"

using grpc::ClientContext;
using grpc::Status;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using inference::ModelStreamInferResponse;
using Stub = GRPCInferenceService::Stub;

ModelInferRequest Request(const std::string& model, const std::string& input, const std::string& datatype, int count) {
  ModelInferRequest request;
  request.set_model_name(model);
  auto* tensor = request.add_inputs();
  tensor->set_name(input);
  tensor->set_datatype(datatype);
  tensor->add_shape(1);
  tensor->add_shape(count);
  return request;
}

void Tell(const std::string& name, const std::string& text) { std::cout << name << ": " << text << "\n"; }

std::string Told(const Status& status) {
  return status.ok() ? "OK" : std::to_string(status.error_code()) + " " + status.error_message();
}

template <typename T>
std::string Values(const ModelInferResponse& reply) {
  std::ostringstream out;
  const std::string& data = reply.raw_output_contents(0);
  for (size_t i = 0; i < data.size() / sizeof(T); i++) {
    out << (i ? " " : "") << +reinterpret_cast<const T*>(data.data())[i];  // `+`: numbers and no characters
  }
  return out.str();
}

std::string Texts(const ModelInferResponse& reply) {
  std::string out;
  const std::string& data = reply.raw_output_contents(0);
  for (size_t at = 0; at + 4 <= data.size();) {
    const uint32_t length = *reinterpret_cast<const uint32_t*>(data.data() + at);
    out += "<" + data.substr(at + 4, length) + ">";
    at += 4 + length;
  }
  return out;
}

// Asks for the values of a tensor, and tells them or the status.
void Ask(Stub& stub, const std::string& name, const ModelInferRequest& request,
         std::string (*values)(const ModelInferResponse&), grpc_compression_algorithm compression = GRPC_COMPRESS_NONE) {
  ClientContext context;
  context.set_compression_algorithm(compression);
  ModelInferResponse reply;
  const Status status = stub.ModelInfer(&context, request, &reply);
  Tell(name, status.ok() ? values(reply) : Told(status));
}

void TypedTensors(Stub& stub) {
  auto bools = Request("identity_bool", "x", "BOOL", 2);
  bools.mutable_inputs(0)->mutable_contents()->add_bool_contents(true);
  bools.mutable_inputs(0)->mutable_contents()->add_bool_contents(false);
  Ask(stub, "BOOL", bools, Values<uint8_t>);
  for (const auto& [model, datatype] : {std::pair("identity_int8", "INT8"), std::pair("identity_int16", "INT16")}) {
    auto request = Request(model, "x", datatype, 2);
    request.mutable_inputs(0)->mutable_contents()->add_int_contents(-7);
    request.mutable_inputs(0)->mutable_contents()->add_int_contents(9);
    Ask(stub, datatype, request, datatype[3] == '8' ? Values<int8_t> : Values<int16_t>);
  }
  auto unsigned64 = Request("identity_uint64", "x", "UINT64", 1);
  unsigned64.mutable_inputs(0)->mutable_contents()->add_uint64_contents(~0ull);
  Ask(stub, "UINT64", unsigned64, Values<uint64_t>);
  auto doubles = Request("identity_fp64", "x", "FP64", 2);
  doubles.mutable_inputs(0)->mutable_contents()->add_fp64_contents(0.5);
  doubles.mutable_inputs(0)->mutable_contents()->add_fp64_contents(-2);
  Ask(stub, "FP64", doubles, Values<double>);
  auto texts = Request("identity_bytes", "x", "BYTES", 3);
  for (const char* text : {"one", "", "three"}) texts.mutable_inputs(0)->mutable_contents()->add_bytes_contents(text);
  Ask(stub, "BYTES", texts, Texts);
}

void RawTensors(Stub& stub) {
  const std::vector<float> row(1000, 1.5f);
  auto floats = Request("identity_fp32", "x", "FP32", row.size());
  floats.add_raw_input_contents(row.data(), row.size() * sizeof(float));
  for (auto [name, algorithm] : {std::pair("gzip", GRPC_COMPRESS_GZIP), std::pair("deflate", GRPC_COMPRESS_DEFLATE)}) {
    ClientContext context;
    context.set_compression_algorithm(algorithm);
    ModelInferResponse reply;
    const Status status = stub.ModelInfer(&context, floats, &reply);
    Tell(name, status.ok() && reply.raw_output_contents(0) == floats.raw_input_contents(0) ? "same" : Told(status));
  }
  auto none = Request("identity_fp32", "x", "FP32", 0);
  none.add_raw_input_contents("");
  Ask(stub, "empty", none, [](const ModelInferResponse& reply) {
    return std::to_string(reply.outputs(0).shape(1)) + " " + std::to_string(reply.raw_output_contents(0).size());
  });
}

void Errors(Stub& stub) {
  auto wrong = Request("identity_fp32", "x", "FP32", 2);
  Ask(stub, "no data", wrong, Values<float>);
  wrong.add_raw_input_contents("1234");
  Ask(stub, "too few bytes", wrong, Values<float>);
  wrong.mutable_inputs(0)->set_datatype("INT32");
  Ask(stub, "datatype", wrong, Values<float>);
  wrong.set_model_name("nothing");
  Ask(stub, "unknown", wrong, Values<float>);
}

ModelInferRequest Step(float value, bool begins, bool ends) {
  auto request = Request("accumulator", "INPUT", "FP32", 1);
  request.add_raw_input_contents(&value, sizeof value);
  (*request.mutable_parameters())["sequence_start"].set_bool_param(begins);
  (*request.mutable_parameters())["sequence_end"].set_bool_param(ends);
  return request;
}

// Two sequences by turns in one stream, one of which has a text as its id; then a step of a sequence that has ended.
void Sequences(Stub& stub) {
  ClientContext context;
  auto both = stub.ModelStreamInfer(&context);
  for (int i = 1; i <= 3; i++) {
    auto one = Step(i, i == 1, i == 3), other = Step(10 * i, i == 1, i == 3);
    (*one.mutable_parameters())["sequence_id"].set_int64_param(7);
    (*other.mutable_parameters())["sequence_id"].set_string_param("seven");
    one.set_id("one");
    other.set_id("other");
    both->Write(one);
    both->Write(other);
  }
  auto late = Step(1, false, false);
  (*late.mutable_parameters())["sequence_id"].set_int64_param(7);
  late.set_id("late");
  both->Write(late);
  both->WritesDone();
  ModelStreamInferResponse reply;
  while (both->Read(&reply)) {
    const auto& answer = reply.infer_response();
    Tell(answer.id(), reply.error_message().empty() ? Values<float>(answer) : reply.error_message());
  }
  Tell("stream", Told(both->Finish()));
}

// With this metadata the first error ends the stream, and is its status.
void StrictStream(Stub& stub) {
  ClientContext context;
  context.AddMetadata("triton_grpc_error", "true");
  auto both = stub.ModelStreamInfer(&context);
  both->Write(Request("nothing", "x", "FP32", 1));
  ModelStreamInferResponse reply;
  while (both->Read(&reply)) Tell("strict", reply.error_message());
  Tell("strict", Told(both->Finish()));
}

int main(int, char** argv) {
  auto stub = GRPCInferenceService::NewStub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  TypedTensors(*stub);
  RawTensors(*stub);
  Errors(*stub);
  Sequences(*stub);
  StrictStream(*stub);
}

/* The test backends, one for each BEHAVIOUR; an input INPUT… becomes an output OUTPUT… of its shape.
 *
 * IDENTITY  copies; the parameter 'delay_ms' of a request delays its response; logs a line, counts executions
 * SQUARE    squares FP32
 * REPEAT    decoupled: one response for each element of INPUT (INT32), from a thread, after the request's release;
 *           'delay_ms' is the time between two responses; a negative element is an error, and the stream goes on
 * CRASH     copies; a negative first element of INPUT (INT32) ends the process
 * LEAK      copies, and keeps 8 MiB for each request
 * ERRORS    the first element of INPUT (INT32) is the code of the response's error; 0 copies; -1 fails the execution
 * SEQUENCE  OUTPUT is the sum of the sequence's INPUTs (INT32), by the control inputs START, READY and CORRID
 * SHAPES    the first element of INPUT (INT32) chooses the shape of OUTPUT: 1 [-1, -1], 2 of 100 dimensions; 0 copies */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "triton_backend.h"

#define IDENTITY 1
#define SQUARE 2
#define REPEAT 3
#define CRASH 4
#define LEAK 5
#define ERRORS 6
#define SEQUENCE 7
#define SHAPES 8

typedef struct {
  const char* name;
  int datatype;
  const int64_t* shape;
  uint32_t rank;
  uint64_t byte_size;
  void* data; /* owned */
} Input;

static void check(TRITONSERVER_Error* error) {
  if (error == NULL) return;
  fprintf(stderr, "test backend: %s\n", TRITONSERVER_ErrorMessage(error));
  TRITONSERVER_ErrorDelete(error);
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static Input read_input(TRITONBACKEND_Input* handle) {
  Input input;
  uint32_t parts;
  uint64_t at = 0;
  check(TRITONBACKEND_InputProperties(
      handle, &input.name, &input.datatype, &input.shape, &input.rank, &input.byte_size, &parts));
  input.data = malloc(input.byte_size + 1);
  for (uint32_t part = 0; part < parts; part++) {
    const void* data;
    uint64_t size;
    int memory = 0;
    int64_t memory_id = 0;
    check(TRITONBACKEND_InputBuffer(handle, part, &data, &size, &memory, &memory_id));
    memcpy((char*)input.data + at, data, size);
    at += size;
  }
  return input;
}

static Input named_input(TRITONBACKEND_Request* request, const char* name) {
  TRITONBACKEND_Input* handle;
  Input none = {.data = NULL};
  TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(request, name, &handle);
  if (error == NULL) return read_input(handle);
  TRITONSERVER_ErrorDelete(error);
  return none;
}

static void write_output(
    TRITONBACKEND_Response* response, const char* name, int datatype, const int64_t* shape, uint32_t rank,
    const void* data, uint64_t byte_size) {
  TRITONBACKEND_Output* output;
  void* buffer;
  int memory = 0;
  int64_t memory_id = 0;
  check(TRITONBACKEND_ResponseOutput(response, &output, name, datatype, shape, rank));
  check(TRITONBACKEND_OutputBuffer(output, &buffer, byte_size, &memory, &memory_id));
  if (byte_size) memcpy(buffer, data, byte_size);
}

static int64_t delay_ms(TRITONBACKEND_Request* request) {
  uint32_t count = 0;
  check(TRITONBACKEND_RequestParameterCount(request, &count));
  for (uint32_t index = 0; index < count; index++) {
    const char* key;
    int type;
    const void* value;
    check(TRITONBACKEND_RequestParameter(request, index, &key, &type, &value));
    if (strcmp(key, "delay_ms") == 0 && type == 1) return *(const int64_t*)value;
  }
  return 0;
}

static void copy_inputs(TRITONBACKEND_Request* request, TRITONBACKEND_Response* response) {
  uint32_t count;
  check(TRITONBACKEND_RequestInputCount(request, &count));
  for (uint32_t index = 0; index < count; index++) {
    TRITONBACKEND_Input* handle;
    char name[128];
    check(TRITONBACKEND_RequestInputByIndex(request, index, &handle));
    Input input = read_input(handle);
    snprintf(name, sizeof name, "OUTPUT%s", input.name + strlen("INPUT"));
#if BEHAVIOUR == SQUARE
    for (uint64_t at = 0; at < input.byte_size / sizeof(float); at++) {
      ((float*)input.data)[at] *= ((float*)input.data)[at];
    }
#endif
    write_output(response, name, input.datatype, input.shape, input.rank, input.data, input.byte_size);
    free(input.data);
  }
}

#if BEHAVIOUR == REPEAT
typedef struct {
  TRITONBACKEND_ResponseFactory* factory;
  Input input;
  int64_t delay_ms;
} Stream;

static void* run_stream(void* argument) {
  Stream* stream = argument;
  uint64_t count = stream->input.byte_size / sizeof(int32_t);
  const int32_t* values = stream->input.data;
  for (uint64_t at = 0; at < count; at++) {
    TRITONBACKEND_Response* response;
    int64_t shape[] = {1, 1};
    bool is_cancelled = false;
    check(TRITONBACKEND_ResponseFactoryIsCancelled(stream->factory, &is_cancelled));
    if (is_cancelled) {
      fprintf(stderr, "test backend: cancelled after %d responses\n", (int)at);
      break;
    }
    check(TRITONBACKEND_ResponseNewFromFactory(&response, stream->factory));
    if (values[at] >= 0) write_output(response, "OUTPUT", 8, shape, 2, &values[at], sizeof(int32_t));
    TRITONSERVER_Error* error =
        values[at] < 0 ? TRITONSERVER_ErrorNew(ERROR_INVALID_ARG, "a negative element") : NULL;
    check(TRITONBACKEND_ResponseSend(response, 0, error));
    if (error != NULL) TRITONSERVER_ErrorDelete(error);
    if (stream->delay_ms) usleep(1000 * stream->delay_ms);
  }
  check(TRITONBACKEND_ResponseFactorySendFlags(stream->factory, RESPONSE_COMPLETE_FINAL));
  check(TRITONBACKEND_ResponseFactoryDelete(stream->factory));
  free(stream->input.data);
  free(stream);
  return NULL;
}

static void serve(TRITONBACKEND_Request* request) {
  Stream* stream = malloc(sizeof *stream);
  pthread_t thread;
  stream->input = named_input(request, "INPUT");
  stream->delay_ms = delay_ms(request);
  check(TRITONBACKEND_ResponseFactoryNew(&stream->factory, request));
  pthread_create(&thread, NULL, run_stream, stream);
  pthread_detach(thread);
}
#elif BEHAVIOUR == SEQUENCE
static struct {
  uint64_t id;
  int32_t sum;
} sums[64];

static void serve(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Response* response;
  Input start = named_input(request, "START"), id = named_input(request, "CORRID");
  Input ready = named_input(request, "READY"), input = named_input(request, "INPUT");
  check(TRITONBACKEND_ResponseNew(&response, request));
  if (*(int32_t*)ready.data) { /* else the batcher fills a row up, whose other inputs are those of some request */
    uint64_t correlation_id = *(uint64_t*)id.data;
    int place = correlation_id % 64;
    if (*(int32_t*)start.data) sums[place].sum = 0;
    sums[place].id = correlation_id;
    sums[place].sum += *(int32_t*)input.data;
    write_output(response, "OUTPUT", input.datatype, input.shape, input.rank, &sums[place].sum, sizeof(int32_t));
  }
  check(TRITONBACKEND_ResponseSend(response, RESPONSE_COMPLETE_FINAL, NULL));
  free(start.data);
  free(ready.data);
  free(id.data);
  free(input.data);
}
#else
static void serve(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Response* response;
  TRITONSERVER_Error* error = NULL;
  check(TRITONBACKEND_ResponseNew(&response, request));
#if BEHAVIOUR == IDENTITY
  const char* id;
  int64_t pause_ms = delay_ms(request);
  if (pause_ms) usleep(1000 * pause_ms);
  check(TRITONBACKEND_RequestId(request, &id));
  check(TRITONBACKEND_ResponseSetStringParameter(response, "served", id));
  check(TRITONBACKEND_ResponseSetIntParameter(response, "waited_ms", pause_ms));
#elif BEHAVIOUR == LEAK
  static void* volatile kept; /* or the compiler leaves the block out */
  kept = malloc(8 << 20);
  memset(kept, 1, 8 << 20);
#elif BEHAVIOUR == CRASH || BEHAVIOUR == ERRORS || BEHAVIOUR == SHAPES
  Input input = named_input(request, "INPUT");
  int32_t first = *(int32_t*)input.data;
  free(input.data);
#if BEHAVIOUR == CRASH
  if (first < 0) *(volatile int*)NULL = first;
#elif BEHAVIOUR == SHAPES
  if (first) {
    int64_t shape[100];
    for (int at = 0; at < 100; at++) shape[at] = first == 1 ? -1 : 1;
    write_output(response, "OUTPUT", 8, shape, first == 1 ? 2 : 100, &first, sizeof first);
    check(TRITONBACKEND_ResponseSend(response, RESPONSE_COMPLETE_FINAL, NULL));
    return;
  }
#else
  if (first) error = TRITONSERVER_ErrorNew(first, "the input asks for this error");
#endif
#endif
  if (error == NULL) copy_inputs(request, response);
  check(TRITONBACKEND_ResponseSend(response, RESPONSE_COMPLETE_FINAL, error));
  if (error != NULL) TRITONSERVER_ErrorDelete(error);
}
#endif

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, const uint32_t count) {
  uint64_t begin = now_ns();
#if BEHAVIOUR == ERRORS
  for (uint32_t index = 0; index < count; index++) {
    Input input = named_input(requests[index], "INPUT");
    int32_t first = *(int32_t*)input.data;
    free(input.data);
    if (first == -1) return TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, "the execution failed");
  }
#endif
#if BEHAVIOUR == IDENTITY
  static TRITONSERVER_MetricFamily* family;
  static TRITONSERVER_Metric* metric;
  const TRITONSERVER_Parameter* labels[] = {TRITONSERVER_ParameterNew("subject", 0, "identity")};
  if (family == NULL) {
    check(TRITONSERVER_MetricFamilyNew(&family, METRIC_KIND_COUNTER, "subject_requests", "Requests of the subject"));
    check(TRITONSERVER_MetricNew(&metric, family, labels, 1));
    check(TRITONSERVER_LogMessage(LOG_WARN, __FILE__, __LINE__, "the subject executes"));
  }
  check(TRITONSERVER_MetricIncrement(metric, count));
#endif
  for (uint32_t index = 0; index < count; index++) serve(requests[index]);
  uint64_t end = now_ns();
  for (uint32_t index = 0; index < count; index++) {
    check(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[index], true, begin, begin, end, end));
    check(TRITONBACKEND_RequestRelease(requests[index], RELEASE_ALL));
  }
  check(TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, begin, begin, end, end));
  return NULL;
}

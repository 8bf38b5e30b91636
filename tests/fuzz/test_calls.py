"""All calls of gRPC, with messages that are made from their descriptors, some of them damaged.

Each ends in time, with a status that is no defect of the server's, and says nothing of another tenant.
"""

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor

from qinfer.wire.protos import grpc_service_pb2, health_pb2, reflection_v1_pb2
from tests.fuzz.gateway import NAMES, UNLOADED, FuzzedGateway, Tenant
from tests.support.fuzzing import damaged, fuzz, within_limits
from tests.support.threaded_gateway import is_prescribed

pytestmark = within_limits

ANSWER_S = 15.0
FILES = (grpc_service_pb2, health_pb2, reflection_v1_pb2)
SERVICES = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
METHODS = [method for service in SERVICES for method in service.methods if method.name != "Watch"]  # which has no end
INFER = [method for method in METHODS if method.name in ("ModelInfer", "ModelStreamInfer")]
SEQUENCES = ("sequence_id", "sequence_start", "sequence_end", "qinfer_step")
PARAMETERS = ("priority", "timeout", "binary_data", *SEQUENCES, "config", "file:1/x", "told_a")
CHANGES = ("RepositoryModelLoad", "RepositoryModelUnload")
DEFECTS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
INTEGERS = (0, 1, 2, 4, 7, -1, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
WIDTHS = {
    **dict.fromkeys((FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_ENUM), (-(2**31), 2**31 - 1)),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


class Messages:
    """Makes messages, those of a model's input mostly right.

    Args:
        chance: The random numbers.
        who: Who sends them.
        models: Names of models.
    """

    def __init__(self, chance: random.Random, who: Tenant, models: list[str]) -> None:
        self._chance, self._who = chance, who
        self._hints: dict[str, list[Any]] = {
            "model_name": models,
            "model_version": ["", "1", "2", "-1", "x"],
            "name": ["x", "y", *models],
            "datatype": ["FP32", "BYTES"],
            "id": ["", who.mark],
        }

    def fill(self, message: Any, depth: int = 0) -> Any:
        """Sets some of a message's fields."""
        for field in message.DESCRIPTOR.fields:
            if self._chance.random() < 0.5 and depth < 6:
                self._set(message, field, depth)
        return message

    def infer(self) -> Any:
        """Returns a request that is right, as far as it goes."""
        name = self._chance.choice(("echo", "text", "stateful"))
        message = grpc_service_pb2.ModelInferRequest(model_name=name, id=self._who.mark)
        tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        if message.model_name == "text":
            tensor.datatype = "BYTES"
            tensor.contents.bytes_contents.extend([self._who.mark.encode()] * 4)
        else:
            message.raw_input_contents.append(bytes(16))
        if name == "stateful":
            least, most = WIDTHS[FieldDescriptor.TYPE_INT64]
            message.parameters["sequence_id"].int64_param = max(least, min(self._chance.choice(INTEGERS), most))
            message.parameters["sequence_start"].bool_param = self._chance.random() < 0.5
        return self.fill(message) if self._chance.random() < 0.3 else message

    def _set(self, message: Any, field: Any, depth: int) -> None:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if is_map:
            value_field = field.message_type.fields_by_name["value"]
            entries = getattr(message, field.name)
            for _ in range(self._chance.randint(0, 2)):
                name = self._chance.choice(PARAMETERS)
                if value_field.message_type is not None:
                    self.fill(entries[name], depth + 1)
                else:
                    entries[name] = self._scalar(value_field)
        elif field.is_repeated:
            for _ in range(self._chance.randint(0, 3)):
                if field.message_type is not None:
                    self.fill(getattr(message, field.name).add(), depth + 1)
                else:
                    getattr(message, field.name).append(self._scalar(field))
        elif field.message_type is not None:
            self.fill(getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: Any) -> Any:
        chance = self._chance
        if field.type in WIDTHS:
            low, high = WIDTHS[field.type]
            if field.enum_type is not None:
                return chance.choice(field.enum_type.values).number
            return chance.choice([number for number in INTEGERS if low <= number <= high])
        if field.type == FieldDescriptor.TYPE_BOOL:
            return chance.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
            return chance.choice((0.0, -1.5, float("nan"), float("inf")))
        if field.type == FieldDescriptor.TYPE_BYTES:
            return chance.choice((b"", bytes(16), b"\xff", chance.randbytes(40)))
        return chance.choice(self._hints.get(field.name, ["", "a", self._who.mark, "\0", "é" * 500, "../.."]))


class Caller:
    """A channel, and the tenants who use it."""

    def __init__(self, gateway: FuzzedGateway) -> None:
        self._gateway = gateway
        self._channel: Any = grpc.insecure_channel(gateway.grpc)

    def close(self) -> None:
        self._channel.close()

    def call(self, chance: random.Random) -> None:
        """Makes a call, and looks at its end."""
        who = chance.choice(self._gateway.tenants)
        method = chance.choice(INFER if chance.random() < 0.4 else METHODS)
        count = chance.randint(0, 3) if method.client_streaming else 1
        sent = [self._message(chance, who, method) for _ in range(count)]
        path = f"/{method.containing_service.full_name}/{method.name}"
        if chance.random() < 0.02:
            path = chance.choice((f"{path}x", "/", f"/{who.mark}/{method.name}", path.lower()))
        texts, status = self._answers(path, who, sent, is_stream=method.server_streaming or method.client_streaming)
        try:
            self._check(who, texts, status, b"".join(sent))
        except AssertionError as error:
            error.add_note(f"{who.name} called {path} with {sent!r}"[:4000])
            raise

    def _message(self, chance: random.Random, who: Tenant, method: Any) -> bytes:
        messages = Messages(chance, who, list(UNLOADED if method.name in CHANGES else NAMES))
        if method in INFER and chance.random() < 0.6:
            message = messages.infer()
        else:
            message = messages.fill(message_factory.GetMessageClass(method.input_type)())
        data = bytes(message.SerializeToString())
        return damaged(chance, data) if chance.random() < 0.2 and method.name not in CHANGES else data

    def _answers(self, path: str, who: Tenant, sent: list[bytes], *, is_stream: bool) -> tuple[bytes, Any]:
        """Returns all that came, and the status with its text."""
        metadata = [("authorization", f"Bearer {who.key}")]
        end: Any
        try:
            if is_stream:
                call = self._channel.stream_stream(path)(iter(sent), timeout=ANSWER_S, metadata=metadata)
                return b"".join(call), call
            reply, end = self._channel.unary_unary(path).with_call(sent[0], timeout=ANSWER_S, metadata=metadata)
        except grpc.RpcError as error:
            return b"", error
        return reply, end

    def _check(self, who: Tenant, came: bytes, end: Any, sent: bytes) -> None:
        code, details = end.code(), end.details() or ""
        assert code != grpc.StatusCode.DEADLINE_EXCEEDED
        assert code not in DEFECTS or is_prescribed(500, details), f"{code} {details}"
        for other in self._gateway.tenants:
            if other != who and who.name != "root":
                mark = other.mark.encode()
                assert mark not in came + details.encode(), details


@pytest.fixture
def caller(fuzzed: FuzzedGateway) -> Iterator[Caller]:
    caller = Caller(fuzzed)
    yield caller
    caller.close()


def test_all_calls(caller: Caller, fuzzed: FuzzedGateway) -> None:
    """Whoever calls whatever."""

    def one(chance: random.Random) -> None:
        for _ in range(30):
            caller.call(chance)
        fuzzed.check()

    fuzz(0.1, one)

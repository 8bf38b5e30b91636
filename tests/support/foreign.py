"""Programs in other languages, compiled and run by what scripts/tools has fetched; without it, tests are skipped."""

import asyncio
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from qinfer.wire.protos import grpc_service_pb2, health_pb2, model_config_pb2

PROTOS = ("model_config.proto", "grpc_service.proto", "grpc_health/v1/health.proto")
TOOLS = Path(__file__).parents[2] / ".venv" / "tools"


class Program(NamedTuple):
    """A program: its command without what changes from call to call, and its environment."""

    command: list[str]
    environment: Mapping[str, str]


class Ended(NamedTuple):
    """How a program ended: its exit status, and what it printed."""

    status: int
    printed: str
    errors: str


def tool(name: str, file: str) -> Path:
    """Returns the directory of a tool, or skips the test."""
    path = TOOLS / name
    return path if (path / file).exists() else pytest.skip(f"{name} is not here; scripts/tools fetches it")


def program(name: str) -> str:
    """Returns a program of the machine, or skips the test."""
    return shutil.which(name) or pytest.skip(f"there is no {name}; scripts/tools fetches the rest of what needs it")


def run(command: list[str], **environment: str) -> None:
    """Runs a compiler; what it prints is the failure's text."""
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


async def output(*command: str, **environment: str) -> str:
    """Returns what a program prints; it must end well."""
    ended = await end_of(*command, **environment)
    assert ended.status == 0, ended.errors
    return ended.printed


async def end_of(*command: str, **environment: str) -> Ended:
    """Returns how a program ends."""
    process = await asyncio.create_subprocess_exec(
        *command, env=os.environ | environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, errors = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, printed.decode(), errors.decode())


def protoc(system: Path, *options: str) -> None:
    """Generates code with the compiler of an unpacked system."""
    libraries = next(system.glob("usr/lib/*-linux-gnu"))
    path = f"{system}/usr/bin:{os.environ['PATH']}"
    run([str(system / "usr/bin/protoc"), *options], LD_LIBRARY_PATH=str(libraries), PATH=path)


def go_build(system: Path, directory: Path, source: Path) -> Path:
    """Compiles a program with Debian's Go and its libraries, and the packages in `src` of a directory."""
    root = next(system.glob("usr/lib/go-*"))
    binary = directory / source.parent.name
    run(
        [str(root / "bin/go"), "build", "-o", str(binary), str(source)],
        GOROOT=str(root),
        GOPATH=f"{directory}:{system}/usr/share/gocode",
        GOCACHE=str(directory / "cache"),
        GO111MODULE="off",
        CGO_ENABLED="0",
    )
    return binary


def descriptors(directory: Path) -> Path:
    """Writes what a client of another language knows of the protocol."""
    path = directory / "triton.pb"
    files = FileDescriptorSet()
    for module in (model_config_pb2, grpc_service_pb2, health_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    path.write_bytes(files.SerializeToString())
    return path


def cpp_build(directory: Path, source: Path) -> Program:
    """Builds a client of one source file in C++, with Debian's gRPC."""
    system, compiler = tool("grpc_cpp", "usr/include/google/protobuf"), program("g++")
    plugin = f"--plugin=protoc-gen-grpc={system}/usr/bin/grpc_cpp_plugin"
    files = f"--descriptor_set_in={descriptors(directory)}"
    protoc(system, files, plugin, f"--cpp_out={directory}", f"--grpc_out={directory}", *PROTOS)
    libraries = next(system.glob("usr/lib/*-linux-gnu"))
    binary = directory / "client"
    sources = [str(source), *map(str, directory.rglob("*.pb.cc"))]
    where = [f"-I{directory}", f"-I{system}/usr/include", f"-L{libraries}", f"-Wl,-rpath-link={libraries}"]
    where.append("-Wl,--copy-dt-needed-entries")  # Abseil's libraries, which its headers call
    run([compiler, "-std=c++17", "-o", str(binary), *where, *sources, "-lgrpc++", "-lgrpc", "-lgpr", "-lprotobuf"])
    return Program([str(binary)], {"LD_LIBRARY_PATH": str(libraries)})

"""Processes: their environments, messages over pipes, names of signals, and protection.

Environments are allow-lists of variables, so that a secret is only where it is used. A program of `qinfer up` gets its
settings, and variables of runtimes and store drivers. A model's code gets no settings, and only the credentials that
the operator names.

It imports nothing large, for the supervisor and small children.
"""

import ctypes
import json
import os
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from asyncio import StreamReader

PREFIX = "QINFER_"
"""The beginning of settings' variables, in any case."""

ALLOW_INSPECTION = f"{PREFIX}ALLOW_INSPECTION"
"""The variable that lets debuggers inspect qinfer's processes; all processes get it."""

_SYSTEM = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS",
    "LANG", "LANGUAGE", "LC_*", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP", "XDG_*",
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_*", "MALLOC_*", "GLIBC_TUNABLES",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
)  # fmt: skip
_RUNTIMES = (
    "CUDA_*", "CUDNN_*", "CUBLAS_*", "NVIDIA_*", "NCCL_*", "CUPY_*", "ROCR_*", "ROCM_*", "HIP_*", "HSA_*", "MIOPEN_*",
    "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "BLIS_*", "VECLIB_*", "NUMEXPR_*", "NUMBA_*", "DNNL_*",
    "ONEDNN_*", "ORT_*", "OV_*", "OPENVINO_*", "TORCH*", "PYTORCH_*", "TRITON_*", "TF_*", "XLA_*", "JAX_*",
    # HF_TOKEN is a credential
    "HF_HOME", "HF_ENDPOINT", "HF_HUB_*", "HF_DATASETS_*", "HUGGINGFACE_HUB_CACHE",
    "TRANSFORMERS_*", "TOKENIZERS_*", "SENTENCE_TRANSFORMERS_HOME", "NLTK_DATA", "MPLCONFIGDIR",
)  # fmt: skip
_SERVICES = (
    "AWS_*", "BOTO_*", "AZURE_*", "IDENTITY_*", "MSI_*", "GOOGLE_*", "GCLOUD_*", "GCE_*", "CLOUDSDK_*",
    "STORAGE_EMULATOR_HOST", "FSSPEC_*", "HADOOP_*", "ARROW_*", "JAVA_HOME", "CLASSPATH", "KRB5*", "SSH_AUTH_SOCK",
    "OTEL_*", "GRPC_*",
    # may contain a password
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy",
)  # fmt: skip


class ProgramRole(NamedTuple):
    """Sections and other settings of a program, without those that are `withheld` (`section.name`)."""

    settings: frozenset[str]
    withheld: frozenset[str] = frozenset()


_OF_WORKERS = frozenset(
    {
        "redis",
        "limits",
        "cache",
        "rate_limit",
        "requests",
        "metrics",
        "stores",
        "bulk",
        "worker",
        "repository",
        "log",
        "allow_inspection",
        "strict_settings",
    }
)
GATEWAY = ProgramRole(
    _OF_WORKERS
    | {"http", "console", "cors", "grpc", "webhooks", "endpoints", "labeling", "auth", "autoscale", "trace", "segments"}
    | {"allow_client_shm", "server_id", "pass_env"}
)
WORKER = ProgramRole(_OF_WORKERS | {"segments"}, withheld=frozenset({"bulk.broker_url", "segments.listen_host"}))
BULK_WORKER = ProgramRole(_OF_WORKERS)


def program_environment(role: ProgramRole, base: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """Returns a program's environment."""
    found = _matching(base, (*_SYSTEM, *_RUNTIMES, *_SERVICES, *passed))
    for name, value in base.items():
        given = _setting(role, name.upper().removeprefix(PREFIX).lower(), value) if _is_setting(name) else None
        if given is not None:
            found[name] = given
    return found


def helper_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Returns a helper's environment; all else comes over a pipe."""
    return _matching(base, _SYSTEM) | {name: value for name, value in base.items() if name.upper() == ALLOW_INSPECTION}


def model_environment(base: Mapping[str, str], passed: Iterable[str] = ()) -> dict[str, str]:
    """Returns the environment of a model's code."""
    return _matching(base, (*_SYSTEM, *_RUNTIMES, *passed))


def system_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a foreign program, such as redis-server."""
    return _matching(base, _SYSTEM)


def without_settings(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that are no settings, and `ALLOW_INSPECTION`."""
    return {name: value for name, value in base.items() if not _is_setting(name) or name.upper() == ALLOW_INSPECTION}


def _matching(base: Mapping[str, str], patterns: Iterable[str]) -> dict[str, str]:
    known = tuple(patterns)
    return {
        name: value
        for name, value in base.items()
        if not _is_setting(name) and any(fnmatchcase(name, pattern) for pattern in known)
    }


def _is_setting(name: str) -> bool:
    return name.upper().startswith(PREFIX)


def _setting(role: ProgramRole, setting: str, value: str) -> str | None:
    """Returns what a role may see of a setting, named `redis__url`, or `redis` for a section."""
    section, _, name = setting.partition("__")
    if section not in role.settings or f"{section}.{name}" in role.withheld:
        return None
    withheld = {dotted.partition(".")[2] for dotted in role.withheld if dotted.startswith(f"{section}.")}
    if name or not withheld:
        return value
    try:
        fields = json.loads(value)
        return json.dumps({field: inner for field, inner in fields.items() if field.lower() not in withheld})
    except (ValueError, AttributeError):
        # The program's parent has refused it.
        return None


LENGTH = struct.Struct("<I")
"""The length in front of each message, which is msgpack."""
MAX_BYTES = 2**32 - 1

SWITCH_INTERVAL_S = 0.0001
"""A thread's longest wait for the GIL. Python's 5 ms exceed many batches' time, and a small request's four steps might
each wait that long.
"""

_PR_SET_DUMPABLE = 4  # linux/prctl.h
_UMASK = 0o027
_YES = frozenset({"1", "true", "t", "yes", "y", "on"})


def packed(message: msgspec.Struct) -> bytes:
    """Returns a message with its length."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


async def received(stream: "StreamReader", max_bytes: int = MAX_BYTES) -> bytes:
    """Waits for a message without its length; `ValueError` above `max_bytes`."""
    (size,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
    if size > max_bytes:
        raise ValueError(f"a message of {size} bytes; at most {max_bytes}")
    return await stream.readexactly(size)


def signal_name(number: int) -> str:
    """Returns a signal's name, such as `SIGSEGV`, if it has one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def protect_process(environment: Mapping[str, str]) -> None:
    """Protects this process's memory, environment and files from other processes of the same user.

    A model's code runs as that user, and could read secrets in /proc or as a debugger; root still can. The kernel dumps
    no core of a protected process, and drops the protection at `exec` (prctl(2), PR_SET_DUMPABLE): each program calls
    this before it reads its settings. Only Linux has it; `QINFER_ALLOW_INSPECTION=true` switches it off.

    New files belong to tenants: they get mode 0640 at most, directories 0750; a stricter umask stays.
    """
    os.umask(os.umask(_UMASK) | _UMASK)
    allowed = next((value for name, value in environment.items() if name.upper() == ALLOW_INSPECTION), "")
    if sys.platform == "linux" and allowed.strip().lower() not in _YES:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)

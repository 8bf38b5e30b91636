"""What a client sends of a bulk job: its JSON, its URLs, and what is to be changed of it."""

import contextlib
from collections.abc import Sequence

import msgspec

from qinfer.bulk.job import JobSpec, check_spec, decode_spec
from qinfer.errors import InvalidRequest
from qinfer.storage.urls import check_url


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may be changed of a job when it is resumed; `None` = as it was. See `JobSpec`."""

    error_threshold: float | None = None
    max_parallel: int | None = None
    deadline_s: float | None = None


def decode_job(body: bytes, allow: Sequence[str]) -> tuple[JobSpec, str]:
    """Reads a job, its URLs in their one spelling, and the id that its client chose; empty without one."""
    fields: dict[str, msgspec.Raw] = {}
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # `decode_spec` says what is wrong with it
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    chosen = _text(fields.pop("id")) if "id" in fields else ""
    spec = decode_spec(msgspec.json.encode(fields) if chosen else body)
    inputs = tuple(dict.fromkeys(check_url(url, allow) for url in spec.inputs))
    output = msgspec.structs.replace(spec.output, url=check_url(spec.output.url, allow))
    return msgspec.structs.replace(spec, inputs=inputs, output=output), chosen


def decode_changes(body: bytes) -> Changes:
    """Reads what is to be changed of a job; no body at all is nothing.

    Raises:
        InvalidRequest: It is none of these fields, or one of another type.
    """
    try:
        return msgspec.json.decode(body, type=Changes) if body else Changes()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(
            f"what is to be changed can't be read: {error}; there are {', '.join(Changes.__struct_fields__)}"
        ) from None


def changed(spec: JobSpec, changes: Changes) -> JobSpec:
    """Returns a job with changes.

    Raises:
        InvalidRequest: A value can't be.
    """
    given = {name: value for name in Changes.__struct_fields__ if (value := getattr(changes, name)) is not None}
    found = msgspec.structs.replace(spec, **given)
    check_spec(found)
    return found


def _text(value: msgspec.Raw) -> str:
    text = ""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        text = msgspec.json.decode(value, type=str)
    if not text:
        raise InvalidRequest("field 'id' is no text, or empty; leave it out to have the server make one")
    return text

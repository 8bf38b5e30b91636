"""Bodies of the gateway's replies that are records of the Python client too, each defined once."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy, which the command line loads late
    from qinfer.tensors import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMetadata:
    """An input or output of a model, as its metadata describes it; -1 is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMetadata:
    """The metadata of a model: the answer to `GET /v2/models/{m}`.

    Attributes:
        name: The model's name.
        versions: The versions that are ready.
        platform: The model's platform in Triton's terms, or its backend.
        inputs: The inputs of a request.
        outputs: The outputs of a response.
    """

    name: str
    versions: tuple[str, ...]
    platform: str = ""
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIndexEntry:
    """A model of the repositories, or one of its versions.

    Attributes:
        name: The model's name.
        version: The version; empty for a model that was never loaded.
        state: `READY`, `UNAVAILABLE`, `LOADING` or `UNLOADING`; empty for a model that was never loaded.
        reason: Why the version is not ready.
    """

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEstimate:
    """The size of a bulk job that the gateway would accept.

    Attributes:
        model: The model.
        version: The version that would score it.
        files: Input files.
        rows: Rows of the inputs, up to the job's `limit`.
        shards: Shards that the job would have.
        workers: Workers that have the model version now.
        rows_per_s: Rows per second of one worker; `None` (null) = not known yet.
        estimated_s: Seconds that the job would take with these workers and no other work; `None` (null) = not known.

    Example:
        {"model": "digits", "version": 1, "files": 2, "rows": 100000, "shards": 8, "workers": 2, "rows_per_s": 5000.0,
         "estimated_s": 10.0}
    """

    model: str
    version: int
    files: int
    rows: int
    shards: int
    workers: int
    rows_per_s: float | None
    estimated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLogLine:
    """A line of a job's log; `at` is an instant in RFC 3339."""

    at: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviewColumn:
    """A column of a preview: its name and the Arrow type of its values, cut to 200 characters."""

    name: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPreview:
    """The first rows of a job's inputs or output as text.

    Attributes:
        of: `input`, `output`, or `failed`: the rows that failed, with their errors.
        file: The URL of the file of the first row; empty = there is no such file yet.
        columns: The first 50 columns.
        columns_left_out: The number of further columns, and of those that have the same name.
        rows: A value for each column: as CSV has it, cut after 200 characters; `None` (null) = null, or a value of a
            row of more than 4 MiB.

    Example:
        {"of": "output", "file": "s3://bucket/scores/part-00000.parquet", "columns": [{"name": "label", "type":
         "int64"}], "columns_left_out": 0, "rows": [["2"], ["7"]]}
    """

    of: str
    file: str = ""
    columns: tuple[PreviewColumn, ...] = ()
    columns_left_out: int = 0
    rows: tuple[tuple[str | None, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """An input of a recorded request; JSON has `data`, the raw elements as in Triton's binary form, in base64."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """The copy of a request that has arrived at a gateway, without its caller, headers and id.

    Attributes:
        arrival_ms: Milliseconds from the begin of the recording to the request's arrival.
        inputs: The inputs.
        parameters: Custom parameters without forwarded headers; and `sequence_id`, a number in place of the caller's
            id, `sequence_start` and `sequence_end` of a sequence's step.
    """

    arrival_ms: float
    inputs: tuple[RecordedTensor, ...]
    parameters: Mapping[str, bool | int | float | str]

    @property
    def tensors(self) -> "tuple[Tensor, ...]":
        """The inputs as tensors; `qinfer.tensors.to_numpy` makes arrays of them."""
        from qinfer.tensors import Tensor

        return tuple(Tensor(one.name, one.datatype, one.shape, one.data) for one in self.inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording of the requests for a model.

    Attributes:
        id: The recording's id.
        model: The model.
        requests: The most copies.
        nbytes: The most bytes of all copies.
        begins_at: Its begin, in seconds since the epoch.
        ends_at: Its end, unless it is full or stopped before.
    """

    id: str
    model: str
    requests: int
    nbytes: int
    begins_at: float
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPage:
    """The next copies of a recording.

    Attributes:
        recording: The recording.
        requests: The copies, in the order in which gateways wrote them; those of several gateways are not sorted.
        next: The place behind the last copy, for the next page.
        ended: Whether no page with copies follows.
        dropped: Requests so far that were not copied, because copies came too fast or were too large.
    """

    recording: Recording
    requests: tuple[RecordedRequest, ...]
    next: str
    ended: bool
    dropped: int


def index_body(entries: Iterable[ModelIndexEntry]) -> list[dict[str, Any]]:
    """Returns a model index as Triton writes it, without empty fields."""
    return [{name: value for name, value in asdict(entry).items() if value} for entry in entries]

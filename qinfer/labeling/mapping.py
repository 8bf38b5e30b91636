"""A mapping: which fields of a task are which inputs of a model, and which of its outputs are which labels.

docs/reference/labeling-mappings.md has every field. YAML values are read as text and converted by the fields' types, so
that labels such as `no`, `007` and `2026-01-31` stay unchanged. A gateway's `MappingBook` reloads changed files.
"""

import asyncio
import base64
import logging
import time
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from qinfer.core.documents import Unreadable, parse, problems_of, read_limited
from qinfer.core.messages import OutgoingRequest, Response
from qinfer.errors import Forbidden, InferenceFailed, InvalidRequest, SettingsError, UnsupportedFeature
from qinfer.labeling.results import Outputs, Prediction, Scoring, Task, field_of, make_prediction, outputs_of
from qinfer.labeling.rules import LabelConfig, Rule, rule_problems, wanted_outputs
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, datatype, from_numpy, pack_bytes

Kind = Literal["text", "bytes", "tensor", "file"]


def _without_dollar(value: object) -> object:
    return value.removeprefix("$") if isinstance(value, str) else value


class InputField(BaseModel):
    """The field of a task that an input is made of; dots in `field` lead into objects."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    field: Annotated[str, BeforeValidator(_without_dollar), Field(min_length=1)]
    kind: Kind = "text"


def input_problems(inputs: AnyMapping[str, InputField], spec: ModelSpec) -> Iterator[str]:
    """Yields why inputs do not fit a model."""
    known = {each.name: each for each in spec.inputs}
    for name, each in inputs.items():
        if name not in known:
            yield f"model '{spec.name}' has no input '{name}'; it has {', '.join(known)}"
            continue
        kind = known[name].datatype
        if each.kind == "text" and kind != "BYTES":
            yield f"input '{name}' is {kind}: kind text needs BYTES"
        if each.kind in {"bytes", "file"} and kind not in {"BYTES", "UINT8"}:
            yield f"input '{name}' is {kind}: kind {each.kind} needs BYTES or UINT8"
    for name, spec_input in known.items():
        if name not in inputs and not spec_input.optional:
            yield f"input '{name}' of model '{spec.name}' has no field; name it in 'inputs'"


def _input_tensor(
    spec: TensorSpec, source: InputField, task: Task, files: AnyMapping[str, bytes], *, is_batched: bool
) -> Tensor:
    try:
        if source.kind == "tensor":
            return _array_tensor(spec, field_of(task, source.field), is_batched=is_batched)
        if source.kind == "text":
            value = field_of(task, source.field)
            texts = value if isinstance(value, list) else [value]
            elements = [_encoded(text) for text in texts]
        else:
            elements = [_content(source, task, files)]
    except InvalidRequest as error:
        raise InvalidRequest(f"input '{spec.name}': {error.message}") from None
    if spec.datatype == "BYTES":
        return Tensor(spec.name, "BYTES", _shape(spec, len(elements), is_batched=is_batched), pack_bytes(elements))
    if spec.datatype != "UINT8" or source.kind == "text":
        raise InvalidRequest(f"input '{spec.name}' is {spec.datatype}: kind {source.kind} can't make it")
    return Tensor(spec.name, "UINT8", _shape(spec, len(elements[0]), is_batched=is_batched), elements[0])


def _encoded(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode(errors="replace")  # a lone surrogate of JSON can't be encoded
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value).encode()
    raise InvalidRequest(f"its field holds {shown(value)}, not text")


def _content(source: InputField, task: Task, files: AnyMapping[str, bytes]) -> bytes:
    text = _text_field(task, source.field)
    if source.kind == "file":
        if text not in files:
            raise InvalidRequest(f"the file of field '{source.field}' was not fetched")
        return files[text]
    if text.startswith("data:"):
        head, comma, text = text.partition(",")
        if not comma or not head.endswith(";base64"):
            raise InvalidRequest(f"field '{source.field}' is a data: URI that is not base64")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # other characters, or an impossible length
        raise InvalidRequest(f"field '{source.field}' is not base64: {error}") from None


def _array_tensor(spec: TensorSpec, value: Any, *, is_batched: bool) -> Tensor:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if spec.datatype == "BYTES":
        flat = array.ravel().tolist() if array.dtype.kind in "U" else None
        if flat is None:
            raise InvalidRequest(f"its field holds {shown(value)}, not text in even lists")
        shape = _array_shape(spec, array.shape, len(flat), is_batched=is_batched)
        return Tensor(spec.name, "BYTES", shape, pack_bytes(_encoded(text) for text in flat))
    if array.dtype.kind not in "biuf" or not array.size:
        raise InvalidRequest(f"its field holds {shown(value)}, not numbers in even lists")
    target = np.dtype(datatype(spec.datatype).numpy or "<f4")
    with np.errstate(all="ignore"):
        cast = array.astype(target)
    fits = np.isfinite(cast) == np.isfinite(array) if target.kind == "f" else cast == array
    if not fits.all():
        raise InvalidRequest(f"its field holds {shown(value)}, which {spec.datatype} can't")
    shape = _array_shape(spec, array.shape, array.size, is_batched=is_batched)
    return from_numpy(spec.name, cast.reshape(shape), "BF16" if spec.datatype == "BF16" else None)


def _array_shape(spec: TensorSpec, shape: tuple[int, ...], count: int, *, is_batched: bool) -> tuple[int, ...]:
    """Returns the input's shape; with as many elements as the input, lists may be nested otherwise."""
    if len(shape) == len(spec.dims) and all(dim in (-1, size) for dim, size in zip(spec.dims, shape, strict=True)):
        return (1, *shape) if is_batched else shape
    return _shape(spec, count, is_batched=is_batched)


def _shape(spec: TensorSpec, count: int, *, is_batched: bool) -> tuple[int, ...]:
    """Returns a shape whose last variable dimension takes all elements; the others are 1."""
    dims = list(spec.dims)
    for i in range(len(dims)):
        if dims[i] == -1:
            dims[i] = 1 if -1 in dims[i + 1 :] else count // max(1, prod(abs(dim) for dim in dims))
    if prod(dims) != count:
        raise InvalidRequest(
            f"input '{spec.name}' of shape {list(spec.dims)} can't have the {count} elements of its field"
        )
    return (1, *dims) if is_batched else tuple(dims)


def _has(task: Task, field: str) -> bool:
    try:
        field_of(task, field)
    except InvalidRequest:
        return False
    return True


def _text_field(task: Task, field: str) -> str:
    value = field_of(task, field)
    if isinstance(value, str) and value:
        return value
    raise InvalidRequest(f"field '{field}' holds {shown(value)}, not text")


def shown(value: object) -> str:
    """Returns a value, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"


_MAX_FILE_BYTES = 4 * 2**20

_SHOWN = 60


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields = parse(read_limited(path, _MAX_FILE_BYTES), path.suffix, is_typed=False)
    except OSError as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {error.strerror}") from None
    except Unreadable as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {error}") from None
    if not isinstance(fields, dict):
        raise SettingsError(f"the mapping '{path}' has no fields; it needs model and results")
    return fields


def _explained(error: ValidationError) -> str:
    """Returns pydantic's findings in one line, with wrong values, without links."""
    return "; ".join(
        f"field '{'.'.join(map(str, item['loc']))}': {_said(text, item['type'], item['input'])}"
        for text, item in problems_of(error)
    )


def _said(text: str, kind: str, value: object) -> str:
    if kind == "union_tag_not_found":
        return "it has no type, such as choices"
    is_shown = isinstance(value, str | int | float) or value is None
    if not is_shown or kind in ("value_error", "extra_forbidden"):
        return text
    return f"{text}, not {'null' if value is None else repr(str(value)[:_SHOWN])}"


SUFFIXES = (".yaml", ".yml", ".toml")

_NO_FILES: AnyMapping[str, bytes] = MappingProxyType({})


def _listed(value: object) -> object:
    return [value] if isinstance(value, int | str) else value


class Mapping(BaseModel):
    """A mapping of labeling tasks to one model, read by `load_mapping`.

    Attributes:
        name: The name of the mapping, unique in a gateway.
        model: The model that is asked.
        version: The model's version; 0 = the highest that is ready.
        project: The Label Studio projects that use it; empty = any project of the model.
        tenant: The tenants that may use it; empty = all.
        mode: `predict`: predictions are answered at once; `push`: tasks are queued and predictions sent later, for
            models that take longer than Label Studio waits.
        priority: The priority of the mapping's requests; 0 = the model's default.
        inputs: The model's input → the field of a task that it is made of.
        results: One rule for each control of the label config that gets predictions.
        score: The confidence of a task: the `mean`, `min` or `max` of the confidences of its results.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    model: Annotated[str, Field(min_length=1)]
    version: Annotated[int, Field(ge=0)] = 0
    project: Annotated[tuple[int, ...], BeforeValidator(_listed)] = ()
    tenant: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()
    mode: Literal["predict", "push"] = "predict"
    priority: Annotated[int, Field(ge=0)] = 0
    inputs: dict[str, InputField] = Field(default_factory=dict)
    results: Annotated[tuple[Rule, ...], Field(min_length=1)]
    score: Scoring = "mean"

    @model_validator(mode="after")
    def _one_rule_for_a_control(self) -> "Mapping":
        controls = [rule.from_name for rule in self.results]
        if twice := next((name for name in controls if controls.count(name) > 1), ""):
            raise ValueError(f"two of the results are for the control '{twice}'")
        return self

    def check(self, spec: ModelSpec | None = None, label_config: LabelConfig | None = None) -> None:
        """Checks the mapping against a model, a label config, or both, before there are tasks.

        Args:
            spec: The model's configuration.
            label_config: The result of `parse_label_config`.

        Raises:
            InvalidRequest: The mapping does not fit; the message names every problem, one a line.
        """
        if found := [*self._problems(spec, label_config)]:
            raise InvalidRequest(f"mapping '{self.name}' does not fit: " + "\n".join(found))

    def files(self, task: Task) -> tuple[str, ...]:
        """Returns the references of the files that `request` needs: URLs or paths, as in the task.

        Raises:
            InvalidRequest: The task lacks a field, or the field is not text.
        """
        fields = [each.field for each in self.inputs.values() if each.kind == "file" and _has(task, each.field)]
        return tuple(dict.fromkeys(_text_field(task, field) for field in fields))

    def request(self, task: Task, spec: ModelSpec, files: AnyMapping[str, bytes] = _NO_FILES) -> OutgoingRequest:
        """Makes the request for one task, with only the outputs that the mapping uses.

        Tasks are batched on the model's queue, not here.

        Args:
            task: `{"id": …, "data": {…}}`, as Label Studio sends it.
            spec: The model's configuration.
            files: The content of each reference that `files` returns.

        Raises:
            InvalidRequest: The task lacks a field, or its value does not fit the input; the message names both.
        """
        inputs = self.inputs
        if unknown := next((name for name in inputs if all(name != each.name for each in spec.inputs)), ""):
            raise InvalidRequest(f"model '{spec.name}' has no input '{unknown}', which the mapping names")
        return OutgoingRequest(
            model=self.model,
            inputs=tuple(
                _input_tensor(each, inputs[each.name], task, files, is_batched=spec.max_batch_size > 0)
                for each in spec.inputs
                if each.name in inputs and not (each.optional and not _has(task, inputs[each.name].field))
            ),
            version=self.version,
            outputs=wanted_outputs(self.results),
            priority=self.priority,
        )

    def prediction(self, task: Task, response: Response, label_config: LabelConfig | None = None) -> Prediction:
        """Makes a task's prediction from the model's response.

        Args:
            task: The task of the request, with the ids of results and perhaps the image's size.
            response: The response to `request`, with its outputs.
            label_config: The label config that results have to fit; `None` = that is not checked.

        Raises:
            OutputMismatch: An output is missing, or its values do not fit the mapping.
            InferenceFailed: The response is a failure.
            InvalidRequest: The results do not fit the label config, or the task lacks the image's size.
        """
        if response.failure:
            raise InferenceFailed(response.failure.message)
        version = model_version(response.model or self.model, response.version)
        return self.prediction_of(task, outputs_of(response.outputs), version, label_config)

    def prediction_of(
        self, task: Task, outputs: Outputs, version: str, label_config: LabelConfig | None = None
    ) -> Prediction:
        """Makes a task's prediction from arrays, such as a row of a bulk job's output.

        Args:
            task: See `prediction`.
            outputs: Output → its values; a leading batch dimension of 1 makes no difference.
            version: The value of `Prediction.model_version`.
            label_config: See `prediction`.

        Raises:
            OutputMismatch: See `prediction`.
            InvalidRequest: See `prediction`.
        """
        if label_config is not None:
            self.check(label_config=label_config)
        return make_prediction(self.results, self.score, task, outputs, version, label_config)

    def _problems(self, spec: ModelSpec | None, label_config: LabelConfig | None) -> Iterator[str]:
        if spec is not None:
            yield from input_problems(self.inputs, spec)
        for rule in self.results:
            yield from rule_problems(rule, spec, label_config)


class Mappings:
    """The mappings of a gateway; `SettingsError` unless names, and pairs of model and project, are unique."""

    def __init__(self, mappings: Sequence[Mapping] = ()) -> None:
        self._mappings = tuple(mappings)
        self._found: dict[tuple[str, int | None], Mapping] = {}
        names: set[str] = set()
        for mapping in mappings:
            if mapping.name in names:
                raise SettingsError(f"two mappings have the name '{mapping.name}'")
            names.add(mapping.name)
            for project in mapping.project or (None,):
                other = self._found.setdefault((mapping.model, project), mapping)
                if other is not mapping:
                    what = "any project" if project is None else f"project {project}"
                    raise SettingsError(
                        f"mappings '{other.name}' and '{mapping.name}' are both for model '{mapping.model}' and {what}"
                    )

    def __len__(self) -> int:
        return len(self._mappings)

    def __iter__(self) -> Iterator[Mapping]:
        return iter(self._mappings)

    def for_model(self, model: str, project: int | None = None) -> Mapping:
        """Returns the project's own mapping for a model, else the mapping for any project."""
        found = self._found.get((model, project)) or self._found.get((model, None))
        if found is None:
            known = ", ".join(sorted({mapping.model for mapping in self._mappings})) or "none"
            raise InvalidRequest(
                f"there is no labeling mapping for model '{model}' and project {project}; "
                f"there are mappings for these models: {known}"
            )
        return found


def model_version(model: str, version: int) -> str:
    """Returns the name that predictions give to their model: `<model>:<version>`."""
    return f"{model}:{version}" if version else model


def load_mappings(directory: str | Path) -> Mappings:
    """Reads the mapping files of a directory, without its subdirectories, or raises `SettingsError`."""
    try:
        paths = sorted(path for path in Path(directory).iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise SettingsError(f"the directory of mappings '{directory}' can't be read: {error.strerror}") from None
    return Mappings([load_mapping(path) for path in paths])


def load_mapping(path: str | Path) -> Mapping:
    """Reads one mapping file.

    Raises:
        SettingsError: The file can't be read or is invalid; the message names file and field.
    """
    path = Path(path)
    fields = _read_fields(path)
    try:
        return Mapping.model_validate({"name": path.stem, **fields})
    except ValidationError as error:
        raise SettingsError(f"the mapping '{path}': {_explained(error)}") from None


logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0

_NAME = "QINFER_LABELING__MAPPINGS"
_Signature = tuple[tuple[str, int, int], ...]


class MappingBook:
    """One gateway's mappings; off without a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory) if directory else None
        self._signature: _Signature = ()
        self._looked_s = time.monotonic()
        self._looking = asyncio.Lock()
        self._mappings = Mappings()
        if self._directory is not None:
            self._mappings = load_mappings(self._directory)
            self._signature = _signature(self._directory)

    @property
    def is_open(self) -> bool:
        """Whether Label Studio is served."""
        return self._directory is not None

    async def current(self) -> Mappings:
        """Returns the mappings; invalid files change nothing."""
        if self._directory is None:
            raise UnsupportedFeature(
                f"Label Studio is not served here; {_NAME} names the directory of its mapping files"
            )
        async with self._looking:
            if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
                await asyncio.to_thread(self._reload_changed, self._directory)
                self._looked_s = time.monotonic()
        return self._mappings

    async def mapping_for(self, model: str, project: int | None) -> Mapping:
        """Returns a model's mapping for a project."""
        try:
            return (await self.current()).for_model(model, project)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error.message}; write one into the directory that {_NAME} names") from None

    async def for_tenant(self, model: str, project: int | None, tenant: str, *, is_shared: bool) -> Mapping:
        """Returns the mapping, if the tenant may use it.

        If several tenants have keys, a mapping without tenants is refused: it leads to all that Label Studio shows.
        """
        mapping = await self.mapping_for(model, project)
        if mapping.tenant and tenant not in mapping.tenant:
            raise Forbidden(f"the labeling mapping '{mapping.name}' is for other tenants than '{tenant}'")
        if is_shared and not mapping.tenant:
            raise Forbidden(
                f"the labeling mapping '{mapping.name}' names no tenant, and several use this server; its operator "
                f"writes 'tenant: {tenant}' into it"
            )
        return mapping

    def _reload_changed(self, directory: Path) -> None:
        signature = _signature(directory)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._mappings = load_mappings(directory)
        except SettingsError as error:
            logger.error("mappings can't be read; the previous ones stay in use", extra={"error": error.message})
        else:
            logger.info("mappings read", extra={"count": len(self._mappings)})


def _signature(directory: Path) -> _Signature:
    found = []
    try:
        for path in directory.iterdir():
            if path.suffix in SUFFIXES:
                about = path.stat()
                found.append((path.name, about.st_mtime_ns, about.st_size))
    except OSError:
        return ()
    return tuple(sorted(found))

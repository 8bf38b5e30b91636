"""A form for a model, made from its metadata, and its answer: numbers, text, images, boxes and class scores."""

import asyncio
import math
import secrets
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from qinfer.core.api_keys import Scope
from qinfer.core.messages import Failure, OutgoingRequest, Response, SequenceFlags
from qinfer.errors import DeadlineExceeded, InvalidRequest, QinferError
from qinfer.models.catalog import ServedVersion
from qinfer.models.spec import ModelSpec, TensorSpec
from qinfer.tensors import Tensor, element_count, from_numpy, numpy_dtype, to_numpy
from qinfer_api.console.boxes import Boxes, detected_boxes
from qinfer_api.console.tensors import ClassScore, ShownTensor, image_of, view_of
from qinfer_api.console.visit import Pages, Visit
from qinfer_api.rest.infer import StreamSink, hold_memory
from qinfer_api.rest.services import off_loop

WITHIN_S = 60.0
MOST_RESPONSES = 100
_MOST_SAMPLE = 4096
_MOST_SIDE = 2048
_CHANNELS = (1, 3, 4)


class ImageShape(NamedTuple):
    """How an input takes an image; 0 = any size. `is_first`: channels come first."""

    height: int
    width: int
    channels: int
    is_first: bool


class FormInput(NamedTuple):
    """An input of the form: its text, and how it may take an image."""

    tensor: TensorSpec
    text: str
    image: ImageShape | None
    is_text: bool


class Picture(NamedTuple):
    """The image of an input, its size as the model gets it (0 = unknown), and findings of the first response."""

    name: str
    image: str
    width: int
    height: int
    boxes: Boxes | None
    best: ClassScore | None


class Answer(NamedTuple):
    """The answer: outputs of each response, and where its time went, in seconds."""

    responses: Sequence[Sequence[ShownTensor]]
    parameters: Sequence[tuple[str, object]]
    version: int
    total_s: float
    queue_s: float
    execute_s: float
    batch_size: int
    picture: Picture | None = None


def try_it_routes(pages: Pages) -> list[Route]:
    """Returns the routes of these pages."""
    return [
        pages.route("/try", choose, needs_redis=False),
        pages.route("/try/{model}", form, acts={"run": (_run_model, Scope.INFER)}, needs_redis=False),
    ]


async def choose(visit: Visit) -> HttpResponse:
    """Lists the models and endpoints that answer now."""
    dispatcher, catalog = visit.parts.services.dispatcher, visit.parts.services.catalog
    word = visit.query("q").lower()
    names = sorted({*dispatcher.endpoints.by_name, *(name for name in catalog.known() if catalog.ready_versions(name))})
    found = [(name, catalog.spec(name), name in dispatcher.endpoints.by_name) for name in names if word in name.lower()]
    return visit.render("try.html", "Try it", "try", rows=found[:200], total=len(found), known=len(names))


async def form(visit: Visit) -> HttpResponse:
    """Shows the form of a model."""
    served = _served(visit)
    fields = [_field(tensor, served.spec, visit.form.get(f"in:{tensor.name}")) for tensor in served.spec.inputs]
    answer: Answer | None = getattr(visit.request.state, "answer", None)
    return visit.render(
        "try_model.html",
        f"Try {visit.name('model')}",
        "try",
        name=visit.name("model"),
        served=served,
        spec=served.spec,
        fields=fields,
        answer=answer,
        versions=visit.parts.services.catalog.ready_versions(served.spec.name),
        chosen=visit.value("version"),
    )


def _served(visit: Visit) -> ServedVersion:
    return visit.parts.services.dispatcher.resolve(visit.name("model"), _version(visit))


def _version(visit: Visit) -> int:
    """Returns the version that the form names; 0 = the highest that is ready."""
    version = visit.value("version")
    return int(version) if version.isascii() and version.isdecimal() and len(version) < 19 else 0


def _field(tensor: TensorSpec, spec: ModelSpec, given: Sequence[str] | None) -> FormInput:
    is_text = tensor.datatype == "BYTES"
    text = given[0] if given is not None else "" if is_text else _sample(tensor)
    if len(text) > 4 * _MOST_SAMPLE:
        text = ""  # an image's numbers need not travel back
    return FormInput(tensor, text, None if is_text else _image_shape(tensor), is_text)


def _sample(tensor: TensorSpec) -> str:
    """Returns zeros of the shape of one item, or an empty text if they are many."""
    count = element_count([1 if size < 0 else size for size in tensor.dims])
    zero = "false" if tensor.datatype == "BOOL" else "0"
    return ", ".join([zero] * count) if count <= 64 else ""


def _image_shape(tensor: TensorSpec) -> ImageShape | None:
    """Returns how a tensor of such dimensions is an image, `None` if it is no image."""
    dims = [0 if size < 0 else size for size in tensor.dims]
    if len(dims) == 4 and dims[0] in (0, 1):
        dims = dims[1:]
    if len(dims) == 2:
        dims = [*dims, 1]
    if len(dims) == 1 and (side := math.isqrt(dims[0])) >= 8 and side * side == dims[0]:
        return ImageShape(side, side, 1, is_first=False)
    if len(dims) != 3:
        return None
    is_first = dims[0] in _CHANNELS and dims[2] not in _CHANNELS
    channels, height, width = dims if is_first else (dims[2], *dims[:2])
    sides = (height, width)
    if channels not in _CHANNELS or any(side and not 8 <= side <= _MOST_SIDE for side in sides):
        return None
    return ImageShape(height, width, channels, is_first)


class ResponseFailed(QinferError):
    """The failure of a model's response."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


async def _run_model(visit: Visit) -> str:
    dispatcher, name, context = visit.parts.services.dispatcher, visit.name("model"), visit.context
    version = 0
    try:
        served = _served(visit)
        version = served.version
        size = sum(len(text) for texts in visit.form.values() for text in texts)
        request = await off_loop(size, _request, visit, served)
        dispatcher.aim(context, request, visit.request.headers.get)
        dispatcher.check(request, served)
        sink = StreamSink()
        began_s = asyncio.get_running_loop().time()
        pending = hold_memory(visit.request, dispatcher.submit(context, request, sink))
        try:
            async with asyncio.timeout(WITHIN_S):
                responses = [one async for one in _first(sink, pending)]
        except TimeoutError:
            raise DeadlineExceeded(f"no answer came within {WITHIN_S:g} s; submit it as a stored request") from None
        finally:
            dispatcher.cancel(pending)
    except ResponseFailed:  # it is counted
        raise
    except QinferError as error:
        raise dispatcher.refuse(name, version, error, context) from None
    took_s = asyncio.get_running_loop().time() - began_s
    visit.request.state.answer = await asyncio.to_thread(_answer, served, request, responses, took_s)
    return ""


async def _first(sink: StreamSink, pending: Any) -> Any:
    count = 0
    async for response in sink.responses(pending):
        if response.failure is not None:
            raise ResponseFailed(response.failure)
        yield response
        count += 1
        if count == MOST_RESPONSES:
            return


def _answer(served: ServedVersion, request: OutgoingRequest, responses: Sequence[Response], took_s: float) -> Answer:
    labels = {output.name: output.labels for output in served.spec.outputs}
    shown = [[view_of(tensor, labels.get(tensor.name, ())) for tensor in one.outputs] for one in responses]
    timing = responses[-1].timing if responses else None
    answer = Answer(
        responses=shown,
        parameters=[pair for one in responses for pair in one.parameters.items()][:20],
        version=responses[-1].version if responses else served.version,
        total_s=took_s,
        queue_s=math.nan,
        execute_s=math.nan,
        batch_size=0,
    )
    if responses:
        with suppress(QinferError):  # a damaged tensor, whose view says so
            found = detected_boxes(responses[0].outputs, labels)
            best = next((view.classes[0] for view in shown[0] if view.classes), None)
            answer = answer._replace(picture=_picture(served.spec, request, found, best))
    if timing is None:
        return answer
    executed_s = (timing.input_ns + timing.infer_ns + timing.output_ns) / 1e9
    return answer._replace(queue_s=timing.queue_ns / 1e9, execute_s=executed_s, batch_size=timing.batch_size)


def _picture(spec: ModelSpec, request: OutgoingRequest, boxes: Boxes | None, best: ClassScore | None) -> Picture | None:
    """Returns findings with the first input that is an image; boxes may be without one."""
    picture = Picture("", "", 0, 0, boxes, best)
    tensors = {tensor.name: tensor for tensor in spec.inputs}
    for given in request.inputs if boxes or best else ():
        tensor = tensors[given.name]
        if given.datatype == "BYTES":
            if image := view_of(given).image:
                return picture._replace(name=given.name, image=image)
        elif (shape := _image_shape(tensor)) is not None:
            rows = given.shape[-2:] if shape.is_first or len(tensor.dims) == 2 else given.shape[-3:-1]
            height, width = (shape.height, shape.width) if shape.height and shape.width else rows
            sizes = (shape.channels, height, width) if shape.is_first else (height, width, shape.channels)
            pixels = to_numpy(given).reshape(-1)[: element_count(sizes)].reshape(sizes)
            return picture._replace(name=given.name, image=image_of(pixels), width=width, height=height)
    return picture if boxes else None


def _request(visit: Visit, served: ServedVersion) -> OutgoingRequest:
    spec, inputs = served.spec, []
    for tensor in spec.inputs:
        file, text = visit.value(f"file:{tensor.name}"), visit.value(f"in:{tensor.name}")
        if tensor.optional and not file and not text.strip():
            continue
        inputs.append(_read_file(tensor, spec, file) if file else read_input_text(tensor, spec, text))
    request = OutgoingRequest(model=visit.name("model"), inputs=tuple(inputs), version=_version(visit))
    if spec.sequences is not None and spec.is_stateful:
        request.sequence = SequenceFlags(secrets.randbits(31) + 1, start=True, end=True)
    return request


def _read_file(tensor: TensorSpec, spec: ModelSpec, file: str) -> Tensor:
    try:
        content = b64decode(file, validate=True)
    except NotBase64:
        raise InvalidRequest(f"the file for '{tensor.name}' did not arrive whole; choose it again") from None
    return from_numpy(tensor.name, _shaped(tensor, spec, np.array([content], dtype=object)))


def read_input_text(tensor: TensorSpec, spec: ModelSpec, text: str) -> Tensor:
    """Makes an input of a form's text: numbers as JSON or with commas, or a text; raises `InvalidRequest`.

    A text is one element if the model takes one, else each line is an element.
    """
    if tensor.datatype == "BYTES":
        is_one = element_count([abs(size) for size in tensor.dims]) == 1 and -1 not in tensor.dims
        elements = [text] if is_one else text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        values: npt.NDArray[Any] = np.array([each.encode() for each in elements], dtype=object)
        return from_numpy(tensor.name, _shaped(tensor, spec, values))
    numbers = _read_numbers(tensor, text)
    try:
        array = np.array(numbers).astype(numpy_dtype(tensor.datatype), casting="unsafe")
        if array.dtype.kind in "iu" and array.tolist() != numbers:
            raise OverflowError
    except (OverflowError, ValueError, TypeError):
        raise InvalidRequest(f"input '{tensor.name}' must be numbers that {tensor.datatype} can hold") from None
    datatype = "BF16" if tensor.datatype == "BF16" else None
    return from_numpy(tensor.name, _shaped(tensor, spec, array), datatype)


def _read_numbers(tensor: TensorSpec, text: str) -> list[float]:
    stripped = text.strip()
    if not stripped.startswith("["):
        stripped = f"[{stripped if ',' in stripped else ','.join(stripped.split())}]"
    try:
        return list(_flat(msgspec.json.decode(stripped)))
    except (msgspec.DecodeError, RecursionError, TypeError):
        raise InvalidRequest(
            f"input '{tensor.name}' must be numbers of shape {list(tensor.dims)}, such as 0.5, 1, 2"
        ) from None


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        elif isinstance(value, int | float):
            yield value
        else:
            raise TypeError


def _shaped(tensor: TensorSpec, spec: ModelSpec, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Gives values the shape that the input has: one variable dimension, or else the rows, follow from their count."""
    dims = list(tensor.dims)
    rows = [-1] if spec.max_batch_size and -1 not in dims else [1] if spec.max_batch_size else []
    if dims.count(-1) > 1:
        side = math.isqrt(values.size // max(element_count([size for size in dims if size > 0]), 1))
        dims = [side if size < 0 else size for size in dims]
    try:
        if not values.size:
            raise ValueError
        return values.reshape([*rows, *dims])
    except ValueError:
        raise InvalidRequest(
            f"input '{tensor.name}' has {values.size} values, and takes shape {list(tensor.dims)}; add or remove some"
        ) from None

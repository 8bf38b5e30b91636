"""Scanners of large JSON before parsing: they count values, measure depth and find long arrays.

A parser makes an object of every value, up to a hundred bytes for two of text, and blocks all threads. These scanners
use numpy, window by window. They ignore brackets and commas in strings.

`load` parses JSON as Triton does: NaN and infinities are numbers; too large ones are an error.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from qinfer.errors import InvalidRequest, PayloadTooLarge
from qinfer.tensors import Bytes

LARGE_BYTES = 256 * 1024
"""Larger texts are scanned before they are parsed."""

WINDOW_BYTES = 64 * 1024
"""Text processed at once; other threads run in between."""

VALUE_BYTES = 128
"""The approximate memory of a parsed value."""

_Bytes = npt.NDArray[np.uint8]
_Numbers = npt.NDArray[np.intp]

_QUOTE, _BACKSLASH, _COMMA = b'"\\,'
_OPEN, _CLOSE, _BEGIN, _END = b"[]{}"
_IS_STRUCTURE = np.zeros(256, bool)
_IS_STRUCTURE[list(b",[]{}")] = True
_DELTAS = np.zeros(256, np.int8)
_DELTAS[[_OPEN, _BEGIN]] = 1
_DELTAS[[_CLOSE, _END]] = -1


class Marks(NamedTuple):
    """A window's structure outside of strings."""

    at: _Numbers
    kinds: _Bytes


class Scan:
    """Scans a text once; strings may continue in the next window."""

    def __init__(self) -> None:
        self._is_inside = False
        self._is_escaped = False

    def marks(self, window: Bytes) -> Marks:
        """Returns the structure of the next window."""
        text = np.frombuffer(window, np.uint8)
        quotes = text == _QUOTE
        if not len(text):
            return Marks(np.flatnonzero(quotes), text)
        if self._is_escaped or (text == _BACKSLASH).any():
            self._drop_escaped(text, quotes)
        inside = np.bitwise_xor.accumulate(quotes)
        if self._is_inside:
            np.logical_not(inside, out=inside)
        self._is_inside = bool(inside[-1])
        at = np.flatnonzero(_IS_STRUCTURE[text] & ~inside)
        return Marks(at, text[at])

    def _drop_escaped(self, text: _Bytes, quotes: npt.NDArray[np.bool_]) -> None:
        slashes = np.flatnonzero(text == _BACKSLASH)
        if self._is_escaped and not (len(slashes) and slashes[0] == 0):
            quotes[0] = False
        was_escaped, self._is_escaped = self._is_escaped, False
        if not len(slashes):
            return
        begins = np.flatnonzero(np.diff(slashes, prepend=-2) != 1)  # of runs of backslashes
        place = np.arange(len(slashes)) - np.repeat(begins, np.diff(begins, append=len(slashes)))
        if was_escaped and slashes[0] == 0:
            place[: begins[1] if len(begins) > 1 else len(place)] += 1
        escaped = slashes[place % 2 == 0] + 1
        if escaped.size and escaped[-1] == len(text):
            self._is_escaped, escaped = True, escaped[:-1]
        quotes[escaped] = False

    def levels(self, window: Bytes, depth: int) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Returns a window's structure, depths, and commas."""
        at, kinds = self.marks(window)
        return at, depth + np.cumsum(_DELTAS[kinds], dtype=np.intp), np.flatnonzero(kinds == _COMMA)


def windows(text: Bytes, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yields positions and windows."""
    view = memoryview(text)
    for at in range(begin, end, WINDOW_BYTES):
        yield at, view[at : min(at + WINDOW_BYTES, end)]


def check_size(text: Bytes, max_depth: int, max_bytes: int, limit: str = "QINFER_HTTP__MAX_INPUT_BYTES") -> int:
    """Checks an unparsed large text; returns its approximate parsed size."""
    scan, depth, values = Scan(), 0, 1
    most = max(max_bytes - len(text), 0) // VALUE_BYTES
    for _, window in windows(text, 0, len(text)):
        kinds = scan.marks(window).kinds
        depth = _deeper(depth, kinds, max_depth)
        values += int(np.count_nonzero((kinds == _COMMA) | (kinds == _OPEN) | (kinds == _BEGIN)))
        if values > most:
            raise _too_many(values, most, len(text), limit)
    return len(text) + values * VALUE_BYTES


def _too_many(found: int, most: int, nbytes: int, limit: str) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the JSON of {nbytes} bytes has at least {found} values, more than the {most} that it may have: parsed, they "
        f"take a multiple of their text. Send fewer at a time, or raise {limit}"
    )


def too_deep(limit: int) -> InvalidRequest:
    """Returns Triton's error."""
    return InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({limit})")


class TextSpan(NamedTuple):
    """An array; `top` counts the commas between its own elements, `commas` all commas."""

    begin: int
    end: int
    commas: int
    top: int
    arrays: int


class _OpenArray:
    def __init__(self, begin: int) -> None:
        self.begin, self.depth = begin, 0
        self.commas = self.top = self.arrays = 0

    def add(self, kinds: _Bytes) -> int:
        levels = self.depth + np.cumsum(_DELTAS[kinds], dtype=np.int64)
        ends = np.flatnonzero(levels == 0)
        taken = int(ends[0]) + 1 if len(ends) else len(kinds)
        kinds, levels = kinds[:taken], levels[:taken]
        is_comma = kinds == _COMMA
        self.commas += int(np.count_nonzero(is_comma))
        self.top += int(np.count_nonzero(is_comma & (levels == 1)))
        self.arrays += int(np.count_nonzero(kinds == _OPEN))
        if taken:
            self.depth = int(levels[-1])
        return taken

    def span(self, end: int) -> TextSpan:
        return TextSpan(self.begin, end, self.commas, self.top, self.arrays - 1)


class _Finder:
    def __init__(self, min_bytes: int) -> None:
        self.found: list[TextSpan] = []
        self._min_bytes = min_bytes
        self._open: _OpenArray | None = None  # the last window ended in it

    def add(self, begin: int, marks: Marks) -> None:
        at, kinds = marks
        braces = np.flatnonzero((kinds == _BEGIN) | (kinds == _END))
        edges = np.concatenate(([-1], braces, [len(kinds)]))
        for first, last in pairwise(edges) if len(edges) < 4 else self._long(at, edges):
            run = Marks(begin + at[first + 1 : last], kinds[first + 1 : last])
            if self._open is not None:
                run = self._go_on(self._open, run)
            if len(run.at):
                self._scan_run(run)
            if last < len(kinds):
                self._open = None

    def _long(self, at: _Numbers, edges: _Numbers) -> list[tuple[int, int]]:
        """Returns runs that may hold a long array."""
        inner = edges[1:-1]
        is_long = np.flatnonzero(np.diff(at[inner]) >= self._min_bytes)
        pairs = [(int(inner[k]), int(inner[k + 1])) for k in is_long]
        return [(-1, int(inner[0])), *pairs, (int(inner[-1]), int(edges[-1]))]

    def _go_on(self, one: _OpenArray, run: Marks) -> Marks:
        """Returns the marks after the open array."""
        taken = one.add(run.kinds)
        if not one.depth and taken:
            self._add_span(one.span(int(run.at[taken - 1]) + 1))
            self._open = None
        return Marks(run.at[taken:], run.kinds[taken:])

    def _scan_run(self, run: Marks) -> None:
        at, kinds = run
        deltas = _DELTAS[kinds].astype(np.int64)
        after = np.cumsum(deltas)
        before = after - deltas
        lowest = np.minimum.accumulate(before)
        opens = np.flatnonzero((kinds == _OPEN) & (before == lowest))
        closes = np.flatnonzero((kinds == _CLOSE) & (after == lowest))
        lengths = at[closes] - at[opens[: len(closes)]]
        for k in np.flatnonzero(lengths + 1 >= self._min_bytes):
            one = _OpenArray(int(at[opens[k]]))
            one.add(kinds[opens[k] : closes[k] + 1])
            self._add_span(one.span(int(at[closes[k]]) + 1))
        if len(opens) > len(closes):
            self._open = _OpenArray(int(at[opens[-1]]))
            self._open.add(kinds[opens[-1] :])

    def _add_span(self, span: TextSpan) -> None:
        if span.end - span.begin >= self._min_bytes:
            self.found.append(span)


def long_arrays(text: Bytes, min_bytes: int, max_depth: int) -> list[TextSpan]:
    """Finds the outermost arrays of `min_bytes` without objects."""
    scan, finder, depth = Scan(), _Finder(min_bytes), 0
    for begin, window in windows(text, 0, len(text)):
        marks = scan.marks(window)
        depth = _deeper(depth, marks.kinds, max_depth)
        finder.add(begin, marks)
    return finder.found


def _deeper(depth: int, kinds: _Bytes, limit: int) -> int:
    if not len(kinds):
        return depth
    levels = depth + np.cumsum(_DELTAS[kinds], dtype=np.int64)
    if levels.max() > limit:
        raise too_deep(limit)
    return int(levels[-1])


_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_STRUCTURE = bytes(c for c in range(256) if c not in b'[]{}"')


def check_depth(text: Bytes, limit: int) -> None:
    """Raises `InvalidRequest` for too deep JSON."""
    if len(text) > LARGE_BYTES:
        scan, depth = Scan(), 0
        for _, window in windows(text, 0, len(text)):
            depth = _deeper(depth, scan.marks(window).kinds, limit)
        return
    raw = text if isinstance(text, bytes) else bytes(text)
    # Quick: the depth can't exceed the brackets.
    if raw.count(b"[") + raw.count(b"{") > limit and _is_deeper(raw, limit):
        raise too_deep(limit)


def _is_deeper(raw: bytes, limit: int) -> bool:
    if b"\\" in raw:  # remaining quotes are strings'
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = raw.translate(_TO_SQUARE, _ALL_BUT_STRUCTURE).split(b'"')[::2]
    brackets = b"".join(outside_strings)
    for _ in range(limit):  # removes the innermost level
        rest = brackets.replace(b"[]", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    # deeper, or unbalanced
    return brackets.count(b"[") > limit or b"[]" in brackets


# rapidjson also accepts `Inf` and `-NaN`. Strings are skipped possessively, in linear time.
_SPECIAL_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-NaN|Inf(?:inity)?', re.DOTALL)


def load(text: bytes, max_depth: int) -> Any:
    """Parses JSON as Triton does, or raises `InvalidRequest`."""
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            if b"NaN" not in text and b"Inf" not in text:
                raise
            document = json.loads(_SPECIAL_NUMBER.sub(_as_python, text), parse_float=_finite)
            msgspec.json.encode(document)  # finds lone surrogates
            return document
    except RecursionError:
        raise too_deep(max_depth) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"failed to parse the request JSON buffer: {error}") from None


def repeated_key(text: bytes, nested: str | None) -> str | None:
    """Returns the first repeated key of an object, or of its member `nested`, if any."""
    pairs: Any = json.loads(_SPECIAL_NUMBER.sub(_as_python, text), object_pairs_hook=_Pairs)
    for members in (pairs, *(value for key, value in pairs if key == nested)):
        seen: set[str] = set()
        for key, _ in members:
            if key in seen:
                return str(key)
            seen.add(key)
    return None


class _Pairs(list[tuple[str, Any]]):
    """The members of an object."""


def _as_python(match: re.Match[bytes]) -> bytes:
    token = match.group()
    return {b"-NaN": b"NaN", b"Inf": b"Infinity"}.get(token, token)


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise ValueError("Number too big to be stored in double.")
    return value

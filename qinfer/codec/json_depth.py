"""The nesting limit of request JSON (reference §1.2), checked before any parser recurses into the text."""

from qinfer.errors import InvalidRequest

_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_STRUCTURE = bytes(c for c in range(256) if c not in b'[]{}"')


def check_depth(text: bytes | memoryview, limit: int) -> None:
    """Refuses JSON nested deeper than `limit`; text that is no JSON may pass, for the parser to refuse.

    Raises:
        InvalidRequest: It is nested too deep (Triton's text).
    """
    raw = text if isinstance(text, bytes) else bytes(text)
    # Depth can't exceed the number of brackets: two scans at memory speed settle nearly every request.
    if raw.count(b"[") + raw.count(b"{") > limit and _is_deeper(raw, limit):
        raise too_deep(limit)


def too_deep(limit: int) -> InvalidRequest:
    """Makes the error that Triton answers with."""
    return InvalidRequest(f"JSON nesting depth exceeds maximum allowed limit ({limit})")


def _is_deeper(raw: bytes, limit: int) -> bool:
    if b"\\" in raw:  # drop escapes, so that each quote left begins or ends a string
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = raw.translate(_TO_SQUARE, _ALL_BUT_STRUCTURE).split(b'"')[::2]
    brackets = b"".join(outside_strings)
    for _ in range(limit):  # each pass removes the innermost level
        rest = brackets.replace(b"[]", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    # What is left is deeper, or unbalanced: that counts when it opens more levels than it may.
    return brackets.count(b"[") > limit or b"[]" in brackets

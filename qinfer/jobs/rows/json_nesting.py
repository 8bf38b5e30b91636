"""How deep JSON lines are nested, found out block by block before a parser recurses into them. Pure.

A parser that recurses ends the process when nothing stops it: each level takes stack.
"""

LIMIT = 100
"""What is nested as deep passes, and twice as deep is refused; between them it depends on where blocks are cut."""

_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_STRUCTURE = bytes(c for c in range(256) if c not in b'[]{}"')


class Nesting:
    """Follows the nesting of a text through its blocks, wherever they are cut."""

    def __init__(self) -> None:
        self._depth = 0
        self._begins = b""  # a quote within a string, and backslashes that may belong to what comes

    def check(self, block: bytes) -> None:
        """Takes the next block; what is no JSON may pass, for the parser stops there.

        Raises:
            ValueError: The text is nested too deep.
        """
        text = self._begins + block
        whole = text.rstrip(b"\\")
        rest = text[len(whole) :] if (len(text) - len(whole)) % 2 else b""
        if b"\\" in whole:  # without escapes each quote begins or ends a string
            whole = whole.replace(b"\\\\", b"").replace(b'\\"', b"")
        structure = whole.translate(_TO_SQUARE, _ALL_BUT_STRUCTURE).replace(b'""', b"")  # leaves all else in or out
        parts = structure.split(b'"')
        self._begins = (b"" if len(parts) % 2 else b'"') + rest
        self._follow(b"".join(parts[::2]))

    def _follow(self, brackets: bytes) -> None:
        for _ in range(LIMIT):  # each pass removes the innermost level
            left = brackets.replace(b"[]", b"")
            if len(left) == len(brackets):
                break
            brackets = left
        closed = brackets.count(b"]")
        self._depth = max(self._depth - closed, 0) + len(brackets) - closed
        if self._depth > LIMIT or b"[]" in brackets:
            raise ValueError(f"a line is nested deeper than {LIMIT} levels")

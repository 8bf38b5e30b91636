"""Formats of files, the form of CSV, the columns of an input, and ranges of rows, as jobs name them. No I/O."""

from collections.abc import Collection
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

InputFormat = Literal["", "parquet", "arrow", "csv", "jsonl"]
InputCompression = Literal["", "gzip", "zstd", "bz2", "none"]

UTF_8 = "utf-8"

NO_GROUPS = -1

_SHOWN = 60

# Constraints of the JSON schema.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Texts = tuple[Text, ...]
SomeTexts = Annotated[Texts, Meta(extra_json_schema={"minItems": 1})]
Dimension = Annotated[int, Meta(extra_json_schema={"minimum": -1})]
Count = Annotated[int, Meta(ge=0, le=2**50)]
Group = Annotated[int, Meta(ge=NO_GROUPS)]

Null = str | bool | int | float
"""Treatment of nulls: `error` fails the row, `nan` gives not-a-number, another value replaces the null."""


# JSON without defaults: a worker of the previous release can read jobs without the newer fields.
class Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The columns that one input tensor is made of.

    Attributes:
        columns: One column, or several scalar columns that form a row's elements in this order; fields of structs by
            path, such as `image.bytes`.
        shape: The shape of one row without the batch dimension, -1 where rows differ; empty = the tensor's.
        null: Treatment of nulls, in lists as well: `error` fails the row, `nan` makes them not-a-number (in inputs of
            floats), any other value of the input's datatype replaces them. Or column → treatment; columns that are not
            named have `error`.
    """

    columns: SomeTexts
    shape: tuple[Dimension, ...] = ()
    null: Null | dict[str, Null] = "error"

    def null_of(self, column: str) -> Null:
        """Returns the treatment of a column's nulls."""
        return self.null.get(column, "error") if isinstance(self.null, dict) else self.null


class Csv(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of CSV inputs.

    Attributes:
        delimiter: The character between two values.
        quote: The character around values that contain delimiters or line ends, doubled to stand for itself; empty = no
            quoting.
        escape: The character before a quote within quotes, and before itself there (a backslash in files of Spark); it
            is a plain character outside quotes. `none` = quotes are doubled; empty = detected from the first file.
        decimal_point: The character before the fraction of a number.
        encoding: The encoding of the text, such as utf-8, latin-1 or windows-1252.
        header: Whether the first row names the columns.
        column_names: The names of the columns, in order, for files without a header; empty = f0, f1, ….
    """

    delimiter: str = ","
    quote: str = '"'
    escape: str = ""
    decimal_point: str = "."
    encoding: str = UTF_8
    header: bool = True
    column_names: Texts = ()


class ColumnChoice(Protocol):
    """The columns of a model's inputs, as a job or a route chooses them."""

    @property
    def columns(self) -> Collection[str]:
        """The inputs with a choice of their own."""

    @property
    def csv_form(self) -> Csv:
        """The form of CSV inputs."""

    def columns_of(self, tensor: str) -> Columns:
        """Returns the columns of an input tensor."""


class Cut(NamedTuple):
    """A position in text from which rows can be read."""

    first_row: int
    begin: int


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one row group of one file.

    Attributes:
        row_group: The row group (Parquet) or record batch (Arrow); -1 = no row group.
        first_row: Counts within the file.
        first_in_group: Counts within the row group; in text, after `begin`.
        begin: The offset of a cut point of text.
        size_bytes: 0 = unknown, of an earlier qinfer.
    """

    url: str
    etag: str
    row_group: Group
    first_row: Count
    rows: Count
    first_in_group: Count
    begin: Count = 0
    size_bytes: Count = 0

    def part(self, skip: int, rows: int) -> "Range":
        """Returns some of the rows."""
        first_row, first_in_group = self.first_row + skip, self.first_in_group + skip
        return msgspec.structs.replace(self, first_row=first_row, first_in_group=first_in_group, rows=rows)

    def split(self, rows: int) -> "tuple[Range, Range]":
        """Returns the first rows, and the others."""
        return self.part(0, rows), self.part(rows, self.rows - rows)


def shown(text: str) -> str:
    """Returns a user's text for a message: printable and shortened."""
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= _SHOWN else clean[:_SHOWN] + "…"

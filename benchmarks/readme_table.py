"""README's table of speeds, and its picture, from a results file: `python -m benchmarks.readme_table [FILE]`.

Both are written by this program only, and never from a run that was incomplete or disturbed.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from benchmarks import environments, page
from benchmarks.bars import QINFER, TRITON
from benchmarks.bodies import GRPC, JSON
from benchmarks.report import SERVERS, SHORT, TRITON_NOTE, short_table
from benchmarks.results import Document, Rows, Setting, summarise

README = environments.ROOT / "README.md"
PICTURE = environments.ROOT / "docs/images/speed.svg"
BEGIN, END = "<!-- speed: written by benchmarks/run -->", "<!-- /speed -->"
GROUPS = {
    title.replace("`", ""): setting
    for title, setting in SHORT.items()
    if setting.connections == 128 and setting.encoding in (JSON, GRPC)
}
"""The groups of bars of the picture, with qinfer's setting."""
NAMES = {**SERVERS, TRITON: "Triton (Python backend)"}
WIDTH, LABELS, RIGHT = 760, 170, 90
BAR, GAP, TITLE = 18, 4, 30
_STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600 } .note { font-size: 11px }
.qinfer { fill: #1f6feb } .other { fill: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .qinfer { fill: #58a6ff } .other { fill: #6e7681 } }"""


class NotPublishable(Exception):
    """The results file is of a run that was incomplete or disturbed."""


def write(document: Document, readme: Path, picture: Path) -> list[str]:
    """Writes README's table between its two comments, and the picture; returns what was written, for people.

    Args:
        document: The results.
        readme: The page with the comments.
        picture: The file of the picture.

    Raises:
        NotPublishable: The results may not be published.
    """
    if document.refusals:
        raise NotPublishable(f"these results may not be published: {document.refusals[0]}")
    rows = summarise(document.samples)
    if missing := [title for title, setting in SHORT.items() if setting not in rows]:
        raise NotPublishable(f"the results lack {missing[0]}")
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(svg(rows, page.measured_on(document.machine)))
    text = readme.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        return [f"written: {picture.name}; {readme.name} has no place for the table, between {BEGIN} and {END}"]
    table = [BEGIN, *short_table(rows), "", page.measured_on(document.machine), TRITON_NOTE, END]
    readme.write_text(before + "\n".join(table) + after)
    return [f"written: {picture.name}, and the table of {readme.name}"]


def svg(rows: Rows, caption: str) -> str:
    """Draws requests per second as horizontal bars, for pages in light and in dark mode."""
    shown = [setting for setting in GROUPS.values() if setting in rows]
    rates = [row.rate for one in shown for name in SERVERS if (row := rows.get(replace(one, server=name)))]
    body, height = [], 8
    for title, setting in GROUPS.items():
        lines = list(_bars(rows, setting, max(rates, default=1.0), height + TITLE))
        if lines:
            body += [f'<text class="title" x="0" y="{height + 18}">{escape(title)}, requests/s</text>', *lines]
            height += TITLE + len(lines) * (BAR + GAP) + 8
    notes = [caption, *_halves(TRITON_NOTE)]
    body += [
        f'<text class="note" x="0" y="{height + 14 + 15 * n}">{escape(note)}</text>' for n, note in enumerate(notes)
    ]
    height += 14 + 15 * len(notes)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    label = 'role="img" aria-label="Requests per second of qinfer and other servers"'
    return "\n".join([f"{head} {label}>", f"<style>{_STYLE}</style>", *body, "</svg>", ""])


def _bars(rows: Rows, setting: Setting, most: float, top: int) -> Iterator[str]:
    """Yields a bar for each server that was measured, with its name and figure."""
    measured = [(name, row) for name in SERVERS if (row := rows.get(replace(setting, server=name)))]
    for number, (name, row) in enumerate(measured):
        y, width = top + number * (BAR + GAP), max(1, round((WIDTH - LABELS - RIGHT) * row.rate / most))
        kind = "qinfer" if name == QINFER else "other"
        yield (
            f'<g><text x="{LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(NAMES[name])}</text>'
            f'<rect class="{kind}" x="{LABELS}" y="{y}" width="{width}" height="{BAR}" rx="2"/>'
            f'<text x="{LABELS + width + 6}" y="{y + 13}">{row.rate:,.0f}</text></g>'
        )


def _halves(text: str) -> list[str]:
    first, _, second = text.partition("; ")
    return [f"{first};", second]


def main(arguments: list[str]) -> int:
    """Writes both from a results file, by default that of the last complete and quiet run."""
    file = Path(arguments[0]) if arguments else environments.HERE / ".work/results.json"
    if not file.exists():
        print(f"{file.name} is not here; `make bench` writes it on a quiet machine")
        return 1
    try:
        print("\n".join(write(Document.read(file), README, PICTURE)))
    except NotPublishable as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

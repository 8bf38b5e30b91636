"""The code of the documents, block by block, and what is to be done with it.

A block of `sh`, `bash` or `python` is executed, unless a comment right above its fence says otherwise:

    <!-- not run: WHY -->        it is not executed
    <!-- saved as: FILE -->      it is written to this file; so are blocks of any other language
    <!-- first: COMMAND -->      this is executed before it: what the text leaves to the reader, such as an id
    <!-- prints: TEXT -->        this is in what it prints
    <!-- may end early -->       its exit status does not matter

One block may have several of them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("tutorials", "how-to")
EXECUTED = ("sh", "bash", "python")

_BLOCK = re.compile(
    r"^(?P<marks>(?:^<!-- [^\n]*? -->\n)*)^```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"^<!-- (not run|saved as|first|prints|may end early)(?:: (.*))? -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of code.

    Attributes:
        page: Its document, from the root of the repository.
        line: Where its fence begins.
        language: What the fence says.
        code: The text between the fences.
        not_run: Why it is not executed; empty where it is.
        saved_as: The file that it becomes; empty where it is none.
        first: A shell command that goes before it.
        prints: What is in its output.
        may_end_early: Whether its exit status does not matter.
    """

    page: str
    line: int
    language: str
    code: str
    not_run: str = ""
    saved_as: str = ""
    first: str = ""
    prints: str = ""
    may_end_early: bool = False

    @property
    def is_executed(self) -> bool:
        """Whether it runs as it stands."""
        return self.language in EXECUTED and not self.not_run and not self.saved_as

    @property
    def is_shell(self) -> bool:
        """Whether it is for a shell."""
        return self.language in ("sh", "bash")

    @property
    def name(self) -> str:
        """Where it is, as an editor opens it."""
        return f"{self.page}:{self.line}"


def guides() -> list[Path]:
    """Returns the pages whose code is executed: README, tutorials and how-to guides."""
    return [ROOT / "README.md", *sorted(path for folder in FOLDERS for path in (ROOT / "docs" / folder).glob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        marks = dict(_MARK.findall(match["marks"]))
        found.append(
            Block(
                page=str(page.relative_to(ROOT)),
                line=text.count("\n", 0, match.start("language")) + 1,
                language=match["language"],
                code=match["code"],
                not_run=marks.get("not run", ""),
                saved_as=marks.get("saved as", ""),
                first=marks.get("first", ""),
                prints=marks.get("prints", ""),
                may_end_early="may end early" in marks,
            )
        )
    return found

"""README's four lines to a first answer, with the wheel in an empty environment: no clone, nothing on PATH."""

import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest

from scripts.clean_room import make_wheel
from scripts.rooms import Room
from tests.support.docs.doc_blocks import ROOT, blocks


def first_answer() -> tuple[list[list[str]], str]:
    """Returns the words of README's first commands, and the answer that it shows below them."""
    commands, answer = [block.code for block in blocks(ROOT / "README.md")][:2]
    return [shlex.split(line.replace("&", ""), comments=True) for line in commands.splitlines()], answer


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_readme_leads_to_a_first_answer_in_four_lines(tmp_path: Path) -> None:
    (install, example, up, curl), shown = first_answer()
    extras = re.fullmatch(r"\.(\[.*\])", install[2])
    assert extras is not None
    room = Room(tmp_path / "room")

    room.install("--no-compile", f"{make_wheel(tmp_path)}{extras[1]}")
    room.run(*example)
    with room.serving(*up[2:]) as url:
        path = curl[-3].removeprefix("localhost:8000")
        body = (room.work / curl[-1].removeprefix("@")).read_bytes()
        with urllib.request.urlopen(f"{url}{path}", body, timeout=30) as reply:
            answer = json.load(reply)

    assert answer == json.loads(shown)

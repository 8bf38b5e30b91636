"""The service of docs/how-to/come-from-other-servers.md: no longer than its peers', and served."""

from pathlib import Path

import httpx
import pytest

from qinfer.testing import serve
from tests.support.docs.doc_blocks import ROOT, blocks

SERVICES = [block for block in blocks(ROOT / "docs/how-to/come-from-other-servers.md") if block.language == "python"]
OURS, *PEERS = SERVICES


def lines_of(code: str) -> int:
    return sum(bool(line.strip()) for line in code.splitlines())


@pytest.mark.parametrize("peer", PEERS, ids=["litserve", "bentoml", "ray", "torchserve", "pytriton"])
def test_the_service_has_no_more_lines_than_that_of_a_peer(peer: object) -> None:
    assert lines_of(OURS.code) <= lines_of(peer.code)  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_service_answers_soon_after_the_command(tmp_path: Path) -> None:
    app = tmp_path / OURS.saved_as
    app.write_text(OURS.code)

    with serve(app, timeout_s=100) as server:
        answer = httpx.post(f"{server.url}/models/embed", json={"text": ["a first one", "a second one"]}, timeout=30)

    assert [len(vector) for vector in answer.json()["embedding"]] == [384, 384]

"""The pipelines of examples/pipelines through the whole server, by requests and by jobs: what their packages give."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.http as triton

from examples.pipelines.build_models import build_minilm, build_ocr
from qinfer.client import Client, Job
from qinfer.testing import wait_until
from tests.e2e.conftest import Stack, running
from tests.support.pipelines import PAGES, SENTENCES, Array, Read, embed_by_package, page, read_by_package

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

WITHIN_S = 200.0
ROWS = 400


class Served:
    """A server with both pipelines, and a folder that its jobs may use."""

    def __init__(self, stack: Stack, folder: Path, client: triton.InferenceServerClient, jobs: Client) -> None:
        self.stack = stack
        self.folder = folder
        self.client = client
        self._jobs = jobs

    def infer(self, model: str, name: str, values: list[list[bytes]] | list[bytes]) -> triton.InferResult:
        array = np.array(values, np.object_)
        tensor = triton.InferInput(name, list(array.shape), "BYTES")
        tensor.set_data_from_numpy(array)
        return self.client.infer(model, [tensor])

    def job(self, model: str, table: pa.Table, **options: Any) -> Job:
        """Has the rows of a table scored."""
        folder = self.folder / model
        (folder / "in").mkdir(parents=True)
        pq.write_table(table, folder / "in" / "rows.parquet")
        urls = (f"file://{folder}/in/*.parquet", f"file://{folder}/out")
        return self._jobs.submit_job(model, *urls, key="id", **options)

    def rows(self, model: str, job: Job) -> list[dict[str, Any]]:
        """Waits for the end of a job; returns its output's rows, by their id."""
        status = job.wait(timeout_s=WITHIN_S)
        assert status.state == "completed", status.error
        parts = sorted((self.folder / model / "out").glob("part-*.parquet"))
        found: list[dict[str, Any]] = pa.concat_tables([pq.read_table(part) for part in parts]).to_pylist()
        return sorted(found, key=lambda row: int(row["id"]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository, folder = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("jobs")
    build_minilm(repository)
    build_ocr(repository)
    allowed = {"QINFER_STORES__ALLOW": f'["file://{folder}"]'}
    with (
        running(repository, tmp_path_factory.mktemp("up"), **allowed) as stack,
        triton.InferenceServerClient(stack.address, network_timeout=60) as client,
        Client(f"http://{stack.address}") as jobs,
    ):
        yield Served(stack, folder, client, jobs)


@pytest.fixture(scope="module")
def package() -> Any:
    import rapidocr_onnxruntime  # with OpenCV: only where these tests run

    return rapidocr_onnxruntime.RapidOCR()


@pytest.fixture(scope="module")
def expected() -> Array:
    return embed_by_package(SENTENCES)


def images() -> list[bytes]:
    return [page(lines, turned=turned) for lines in PAGES for turned in (False, True)]


def is_worker(process: psutil.Process) -> bool:
    return "qinfer_workers.inference" in process.cmdline()


def check_page(found: Read, expected: Read) -> None:
    """Boxes and texts are the same, scores to 1e-3."""
    assert [(box, text) for box, text, _ in found] == [(box, text) for box, text, _ in expected]
    assert [score for *_, score in found] == pytest.approx([score for *_, score in expected], abs=1e-3)


def test_embeddings_are_those_of_the_package(served: Served, expected: Array) -> None:
    """To 1e-4: in a batch of texts of many lengths, and alone; also of none, and of more tokens than it reads."""
    texts = [[text.encode()] for text in SENTENCES]

    together = served.infer("minilm", "text", texts).as_numpy("embedding")
    alone = np.concatenate([served.infer("minilm", "text", [text]).as_numpy("embedding") for text in texts])

    np.testing.assert_allclose(together, expected, atol=1e-4)
    np.testing.assert_allclose(alone, expected, atol=1e-4)


def test_pages_are_read_as_by_the_package(served: Served, package: Any) -> None:
    """Of many lines, one, or none; upright, and upside down."""
    for image in images():
        result = served.infer("ocr", "image", [image])

        boxes, texts, scores = (result.as_numpy(name) for name in ("boxes", "texts", "scores"))
        found = [(b.tolist(), t.decode(), float(s)) for b, t, s in zip(boxes, texts, scores, strict=True)]
        check_page(found, read_by_package(package, image))


def test_a_job_embeds_every_text_once_though_its_worker_is_killed(served: Served, expected: Array) -> None:
    ids = list(range(ROWS))
    table = pa.table({"id": ids, "text": [SENTENCES[number % len(SENTENCES)] for number in ids]})
    job = served.job("minilm", table, rows_per_part=40)
    wait_until(lambda: job.status().rows_done > 0, WITHIN_S, "the first rows")

    (worker,) = [one for one in psutil.Process(served.stack.pid).children() if is_worker(one)]
    os.kill(worker.pid, signal.SIGKILL)

    rows = served.rows("minilm", job)
    assert [row["id"] for row in rows] == ids
    found = np.array([row["embedding"] for row in rows])
    np.testing.assert_allclose(found, expected[np.array(ids) % len(SENTENCES)], atol=1e-4)


def test_a_job_reads_every_page(served: Served, package: Any) -> None:
    """A row that is no image fails alone, and says so."""
    files = [*images()[::2], b"no image"]
    table = pa.table({"id": list(range(len(files))), "image": pa.array(files, pa.binary())})

    rows = served.rows("ocr", served.job("ocr", table, error_threshold=-1))

    assert [row["id"] for row in rows] == list(range(len(files)))
    for row, image in zip(rows[:-1], files, strict=False):
        assert row["error_code"] is None, row["error_message"]
        texts = [text if isinstance(text, str) else text.decode() for text in row["texts"]]
        check_page(list(zip(row["boxes"], texts, row["scores"], strict=True)), read_by_package(package, image))
    assert "step of model 'ocr_prepare': the bytes are no image that Pillow reads" in rows[-1]["error_message"]

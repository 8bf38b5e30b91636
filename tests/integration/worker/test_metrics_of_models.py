"""Triton's metrics of models of every scheduler, as NVIDIA's server counts the same requests by its own clients."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from qinfer.core.settings_sections import CacheSettings, MetricsSettings
from qinfer.testing import eventually
from tests.support import python_models
from tests.support.served_models import ServedModels, models_served, tensor

pytestmark = pytest.mark.timeout(60)

ROWS = np.array([[1, 2], [3, 4]], np.float32)
COUNTS = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
RAISES = python_models.execute('raise pb_utils.TritonModelException("no")')
STREAM = python_models.execute(
    """for request in requests:
    sender = request.get_response_sender()
    for _ in range(3):
        sender.send(reply(x(request)))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
return None"""
)
ENSEMBLE = """
platform: "ensemble" max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
metric_tags { key: "team" value: "red" }
ensemble_scheduling { step {
  model_name: "echo" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
} }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    tags = 'metric_tags { key: "team" value: "red" } metric_tags { key: "Tier" value: "1" }'
    python_models.write_model(path, python_models.ECHO, "echo", dims=2)
    python_models.write_model(path, python_models.ECHO, "tagged", dims=2, more=tags)
    python_models.write_model(path, python_models.ECHO, "cached", dims=2, more="response_cache { enable: true }")
    python_models.write_model(path, RAISES, "raises", dims=2)
    python_models.write_model(path, STREAM, "stream", dims=2, more=python_models.DECOUPLED)
    python_models.write_accumulator(path, "sums")
    (path / "ensemble" / "1").mkdir(parents=True)
    (path / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    return path


OWN = python_models.execute(
    """with self.lock:
    self.counts.increment(len(requests))
    self.level.set(float(x(requests[0]).flat[0]))
    self.times.observe(0.5)
return [reply(x(request)) for request in requests]""",
    before="""
def initialize(self, args):
    import threading
    make = pb_utils.MetricFamily
    self.families = [make("own_requests", "Requests.", make.COUNTER), make("own_level", "Level.", make.GAUGE)]
    self.families.append(make("own_times", "Times.", make.HISTOGRAM))
    self.counts, self.level = (family.Metric({"model": "own"}) for family in self.families[:2])
    self.times = self.families[2].Metric(buckets=[0.1, 1.0])
    self.lock = threading.Lock()
""",
)

LANGUAGE_MODEL = python_models.execute(
    "return [reply(x(request)) for request in requests]",
    before="""
def initialize(self, args):
    make = pb_utils.MetricFamily
    self.family = make("nv_trt_llm_kv_cache_block_metrics", "Blocks.", make.GAUGE)
    self.gauges = []
    for name, value in (("used", 30), ("max", 120), ("tokens_per", 64)):
        labels = {"model": args["model_name"], "version": args["model_version"], "kv_cache_block_type": name}
        self.gauges.append(self.family.Metric(labels))
        self.gauges[-1].set(value)
""",
)

MODELS = ("echo", "tagged", "cached", "raises", "stream", "sums", "ensemble")


class Page:
    """What one scrape shows: the value of a line by what stands before it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("nv_"))

    def of(self, model: str) -> dict[str, str]:
        """Returns the values of a model's series by their names, or names with a reason or a quantile."""
        found = {}
        for series, value in self._values.items():
            if f'model="{model}"' in series:
                more = re.search(r'(?:reason|quantile|le)="([^"]+)"', series)
                found[series.partition("{")[0] + (f" {more[1]}" if more else "")] = value
        return found

    def counts(self, model: str) -> list[int]:
        """Returns how many requests succeeded, and their rows and executions."""
        return [int(self.of(model)[name]) for name in COUNTS]


async def load(scene: ServedModels, *names: str) -> None:
    for name in names:
        await scene.http.load_model(name)


async def scrape(scene: ServedModels) -> Page:
    async with httpx.AsyncClient() as client:
        return Page((await client.get(f"{scene.gateway.url}/metrics")).text)


async def everything_asked(scene: ServedModels) -> None:
    """Asks every model something, one after the other."""
    for model in ("echo", "tagged", "cached", "cached", "ensemble"):
        await scene.infer(model, x=ROWS)
    with pytest.raises(InferenceServerException, match="no"):
        await scene.infer("raises", x=ROWS)
    with pytest.raises(InferenceServerException, match="unexpected shape"):
        await scene.infer("echo", x=np.zeros((1, 3), np.float32))
    for start, end in ((True, False), (False, True)):
        inputs = [tensor("x", np.ones((1, 1), np.float32))]
        await scene.grpc.infer("sums", inputs, sequence_id=5, sequence_start=start, sequence_end=end)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "stream", "inputs": [tensor("x", ROWS)]}

    answers = [error async for _, error in scene.grpc.stream_infer(requests())]
    assert answers == [None] * 3


async def test_every_scheduler_counts_as_tritons(repository: Path) -> None:
    """Each series from 0 on; then requests, rows and executions, summaries and the histogram agree with them."""
    metrics = MetricsSettings(summary_latencies=True, summary_quantiles="0.5:0.05,0.99:0.001", histogram_latencies=True)
    sections = {"metrics": metrics, "cache": CacheSettings(config="local,size=1048576")}
    async with models_served(repository, sections) as scene:
        await load(scene, *MODELS)
        idle = await scrape(scene)
        await everything_asked(scene)
        page = await scrape(scene)

    for model in MODELS:
        zeros = {name: value for name, value in idle.of(model).items() if " 0." not in name and "load" not in name}
        assert set(zeros.values()) == {"0"}, model
        assert {value for name, value in idle.of(model).items() if " 0." in name} == {"Nan"}
        assert idle.of(model).keys() == page.of(model).keys()
        assert any(name.startswith("nv_cache_") for name in page.of(model)) == (model == "cached")
    assert {model: page.counts(model) for model in MODELS} == {
        "echo": [2, 4, 2],  # one of them as the step of the ensemble
        "tagged": [1, 2, 1],
        "cached": [2, 2, 1],
        "raises": [0, 0, 0],
        "stream": [1, 2, 1],
        "sums": [2, 2, 2],
        "ensemble": [1, 2, 1],
    }
    assert page.of("raises")["nv_inference_request_failure BACKEND"] == "1"
    assert page.of("echo")["nv_inference_request_failure OTHER"] == "0"  # what is wrong is refused, and no failure
    cached = page.of("cached")
    assert (cached["nv_cache_num_hits_per_model"], cached["nv_cache_num_misses_per_model"]) == ("1", "1")
    for model, executed in (("echo", "2"), ("cached", "1"), ("stream", "1"), ("sums", "2"), ("ensemble", "1")):
        assert page.of(model)["nv_inference_compute_infer_summary_us_count"] == executed
        assert page.of(model)["nv_inference_first_response_histogram_ms_bucket +Inf"] == executed
        assert float(page.of(model)["nv_inference_queue_summary_us 0.5"]) > 0
        assert ("nv_inference_request_summary_us 0.5" in page.of(model)) == (model != "cached")


async def test_replies_carry_the_load_of_a_language_model(tmp_path: Path) -> None:
    """It exports the gauges of TensorRT-LLM's backend (ORCA)."""
    python_models.write_model(tmp_path, LANGUAGE_MODEL, "llm", dims=2)
    async with models_served(tmp_path) as scene, httpx.AsyncClient() as client:
        await load(scene, "llm")
        url = f"{scene.gateway.url}/v2/models/llm/generate"

        async def is_told() -> bool:
            reply = await client.post(url, json={"x": [1, 2]}, headers={"endpoint-load-metrics-format": "text"})
            assert reply.status_code == 200
            told = "TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=7680"
            return bool(reply.headers.get("endpoint-load-metrics") == told)

        await eventually(is_told, description="the load in a reply")


async def test_tags_are_labels(repository: Path) -> None:
    """Of every series of the model, an ensemble's too, and as the configuration that is loaded has them."""
    async with models_served(repository) as scene:
        await load(scene, "echo", "tagged", "ensemble")
        page = await scrape(scene)
        await scene.http.load_model("tagged", config='{"metric_tags": {"team": "blue"}, "max_batch_size": 8}')
        again = await scrape(scene)

    series = [line for line in page.text.splitlines() if line.startswith("nv_") and "model=" in line]
    labels = {re.sub(r',reason="\w+"', "", line[line.index("{") : line.index("}") + 1]) for line in series}
    assert labels == {
        '{model="echo",version="1"}',
        '{_team="red",model="ensemble",version="1"}',
        '{_Tier="1",_team="red",model="tagged",version="1"}',
    }
    assert 'nv_inference_count{_team="blue",model="tagged",version="1"} 0' in again.text
    assert "_Tier" not in again.text


async def test_counters_can_be_left_out(repository: Path) -> None:
    """As with Triton's `counter_latencies=false`: durations are gone, and the counts of the cache with them."""
    sections = {
        "metrics": MetricsSettings(counter_latencies=False),
        "cache": CacheSettings(config="local,size=1048576"),
    }
    async with models_served(repository, sections) as scene:
        await load(scene, "cached")
        await scene.infer("cached", x=ROWS)
        page = await scrape(scene)

    assert page.counts("cached") == [1, 2, 1]
    assert not [name for name in page.of("cached") if "duration_us" in name or name.startswith("nv_cache_")]


async def test_a_model_that_is_unloaded_has_no_series(repository: Path) -> None:
    """Loaded again it goes on from where it was, as everything of the installation does."""
    async with models_served(repository) as scene:
        await load(scene, "echo")
        await scene.infer("echo", x=ROWS)
        await scene.http.unload_model("echo")

        assert (await scrape(scene)).of("echo") == {}

        await scene.http.load_model("echo")
        await scene.infer("echo", x=ROWS)
        assert (await scrape(scene)).counts("echo") == [2, 4, 2]


async def test_metrics_of_a_models_own_are_shown_at_the_next_read(tmp_path: Path) -> None:
    """Those of its instances are one; they go with the model, and a model that is loaded again begins anew."""
    repository = tmp_path / "repository"
    python_models.write_model(repository, OWN, "own", dims=2, more="instance_group { count: 2 }")
    async with models_served(repository) as scene:
        await load(scene, "own")
        idle = (await scrape(scene)).text
        for number in range(1, 9):
            await scene.infer("own", x=ROWS * number)
            page = (await scrape(scene)).text
            assert f'own_requests{{model="own"}} {number}\n' in page
            assert f'own_level{{model="own"}} {number}\n' in page
        await scene.http.unload_model("own")

        async def are_gone() -> bool:
            return "own_" not in (await scrape(scene)).text

        await eventually(are_gone, description="the end of the model's metrics")

    assert 'own_requests{model="own"} 0\n' in idle
    assert "# HELP own_times Times.\n# TYPE own_times histogram\nown_times_count 8\nown_times_sum 4\n" in page
    assert 'own_times_bucket{le="0.1"} 0\nown_times_bucket{le="1"} 8\nown_times_bucket{le="+Inf"} 8\n' in page

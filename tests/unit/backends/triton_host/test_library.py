"""What the core gets: its configuration, its files, and the errors where they are missing."""

from pathlib import Path

import pytest

from qinfer.backends import registry
from qinfer.backends.parameters import use_triton_files
from qinfer.backends.triton_host.library import TritonFiles, core_config, find_backend, place
from qinfer.backends.triton_host.metrics import samples
from qinfer.errors import BackendUnavailable, ModelLoadFailed
from qinfer.models.config.config import normalise, parse
from qinfer.models.spec import Device
from tests.support.c_backends import write_model
from tests.support.python_models import spec_of

FULL = """
name: "m" backend: "identity" max_batch_size: 8
input { name: "INPUT" data_type: TYPE_INT32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 4 ] }
dynamic_batching { max_queue_delay_microseconds: 500 priority_levels: 2 default_priority_level: 1 }
instance_group { count: 3 kind: KIND_CPU }
response_cache { enable: true }
model_warmup { name: "w" inputs { key: "INPUT" value { data_type: TYPE_INT32 dims: [ 4 ] zero_data: true } } }
parameters { key: "qinfer.split" value { string_value: "true" } }
parameters { key: "mine" value { string_value: "kept" } }
"""


def test_the_core_gets_one_instance_and_none_of_qinfers_work() -> None:
    config = core_config(normalise(parse(FULL), "m"), 3, Device())

    assert [(group.count, list(group.gpus)) for group in config.instance_group] == [(1, [])]
    assert list(config.version_policy.specific.versions) == [3]
    assert list(config.input[0].dims) == [2, 2]
    assert not config.input[0].HasField("reshape")
    assert not config.HasField("response_cache")
    assert not config.model_warmup
    assert list(config.parameters) == ["mine"]
    assert config.HasField("dynamic_batching")
    assert not config.dynamic_batching.ListFields()


def test_an_instance_on_a_gpu_gets_the_group_of_that_gpu() -> None:
    text = 'instance_group [ { kind: KIND_CPU }, { name: "g" count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]'

    (group,) = core_config(parse(text), 1, Device("gpu", 1)).instance_group

    assert (group.name, group.count, list(group.gpus)) == ("g", 1, [1])
    assert group.kind == group.KIND_GPU


@pytest.mark.parametrize("more", ["minimum_slot_utilization: 1", "preferred_batch_size: [ 4 ]"])
def test_the_core_waits_for_no_sequence_and_forgets_none_before_qinfer(more: str) -> None:
    strategy = "direct" if "slot" in more else "oldest"
    text = f"{strategy} {{ max_queue_delay_microseconds: 7 {more} }} max_sequence_idle_microseconds: 5000000"

    batching = core_config(parse(f"sequence_batching {{ {text} }}"), 1, Device()).sequence_batching

    assert batching.max_sequence_idle_microseconds == 6_000_000
    assert batching.HasField(strategy)
    assert not getattr(batching, strategy).ListFields()


def test_a_model_that_is_not_batched_is_not_batched_by_the_core() -> None:
    config = normalise(parse(FULL), "m")
    config.max_batch_size = 0

    assert not core_config(config, 1, Device()).HasField("dynamic_batching")


def test_the_version_comes_before_the_model_and_the_model_before_the_directory(tmp_path: Path) -> None:
    version = write_model(tmp_path, "x")
    shared = tmp_path / "backends" / "x"
    shared.mkdir(parents=True)
    files = TritonFiles(backends=str(tmp_path / "backends"))
    found = []

    for directory in (shared, version.parent, version):
        (directory / "libtriton_x.so").touch()
        found.append(find_backend(files, "x", version))

    assert found == [directory / "libtriton_x.so" for directory in (shared, version.parent, version)]
    assert list(files.backends_there()) == [("x", shared / "libtriton_x.so")]


def test_what_the_core_gets_lies_in_the_cache_and_is_used_again(tmp_path: Path) -> None:
    """A worker that is killed leaves no directory of its own; another configuration has another directory."""
    version = write_model(tmp_path / "models", "x")
    (version.parent / "labels.txt").touch()
    (tmp_path / "libtritonserver.so").touch()
    files, cache = TritonFiles(str(tmp_path)), tmp_path / "cache"

    first, again = (place(files, spec_of(version), version, Device(), cache) for _ in range(2))

    assert again == first
    assert len(list(cache.iterdir())) == 1
    own = first.repository / "m"
    assert sorted(path.name for path in own.iterdir()) == ["1", "config.pbtxt", "labels.txt"]
    assert (own / "1").readlink() == version
    write_model(tmp_path / "others", "x", max_batch_size=3)
    other = tmp_path / "others" / "m" / "1"
    assert place(files, spec_of(other), other, Device(), cache).repository != first.repository
    assert len(list(cache.iterdir())) == 2


def test_the_name_of_a_backend_is_no_path(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    (version / "libtriton_a").mkdir(parents=True)
    (tmp_path / "other.so").touch()

    assert find_backend(TritonFiles(), "a/../../../other", version) is None


def test_an_unknown_backend_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    version = write_model(tmp_path, "nothing")

    with pytest.raises(
        BackendUnavailable, match=r"no backend is called 'nothing'; this worker has .*onnxruntime, .*libtriton"
    ):
        registry.factory("nothing")().load(spec_of(version), version, Device())


def test_a_missing_core_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    version = write_model(tmp_path, "x")
    (version / "libtriton_x.so").touch()
    use_triton_files(TritonFiles(directory=str(tmp_path)))

    try:
        with pytest.raises(BackendUnavailable, match=r"pip install nvidia-pytriton==0\.7\.0"):
            registry.factory("x")().load(spec_of(version), version, Device())
    finally:
        use_triton_files(TritonFiles())


def test_implicit_state_is_refused(tmp_path: Path) -> None:
    state = 'sequence_batching { state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [ 1 ] } }'
    version = write_model(tmp_path, "x", more=state)
    (version / "libtriton_x.so").touch()
    (tmp_path / "libtritonserver.so").touch()
    use_triton_files(TritonFiles(directory=str(tmp_path)))

    try:
        with pytest.raises(ModelLoadFailed, match="implicit states"):
            registry.factory("x")().load(spec_of(version), version, Device())
    finally:
        use_triton_files(TritonFiles())


def test_metrics_of_the_backend_are_read_and_the_servers_own_left_out() -> None:
    text = """# HELP nv_cache Cache
# TYPE nv_cache gauge
nv_cache 1
# HELP mine My requests
# TYPE mine counter
mine{of="a \\"b\\"",to="x"} 3
# TYPE bare gauge
bare -0.5
# TYPE times histogram
times_bucket{le="1"} 2
"""

    found = [(s.name, s.help, s.kind.name, dict(s.labels), s.value) for s in samples(text)]

    assert found == [
        ("mine", "My requests", "COUNTER", {"of": 'a "b"', "to": "x"}, 3.0),
        ("bare", "", "GAUGE", {}, -0.5),
    ]

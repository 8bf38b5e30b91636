"""What a load loads: where instances run, and how little is done when little has changed."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qinfer.backends.base import Backend
from qinfer.backends.parameters import say_once
from qinfer.backends.stub import StubBackend
from qinfer.core.clock import ServerClock
from qinfer.core.settings import LimitSettings
from qinfer.errors import ModelLoadFailed
from qinfer.models.config.config import from_json, normalise, parse, to_json, to_spec
from qinfer.models.repository.cache import FilesCache
from qinfer.models.repository.files import LocalFiles
from qinfer.models.sequence_spec import DirectSpec, OldestSpec, SequenceSpec, StateSpec
from qinfer.models.spec import Device, InstanceSpec, ModelSpec
from qinfer.models.state import StoredModel
from qinfer.tensors import Tensor
from qinfer.testing import FakeClock, stub_spec
from qinfer_workers.inference.devices import devices_of, gpus_here, named
from qinfer_workers.inference.loader import LoadChange, LoadedVersion, Loader, LoadKind

CONFIG = """
backend: "stub" max_batch_size: {rows}
input {{ name: "x" data_type: TYPE_FP32 dims: 2 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 2 }}
version_policy {{ latest {{ num_versions: {latest} }} }}
instance_group {{ count: {count} kind: KIND_CPU }}
"""


class Scene:
    """A model on disk, and what is served of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: list[StubBackend] = []
        self.is_broken = False
        self.on_make: Callable[[], None] = lambda: None
        (path / "m" / "1").mkdir(parents=True)
        self.write("1/model.stub", "weights")
        self.loader = Loader(lambda model, version, *_: path / model / str(version), lambda _: self._make, _clock())
        self.generation = 0
        self.serving: LoadedVersion | None = None

    def write(self, file: str, text: str) -> None:
        path = self.path / "m" / file
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)

    def _make(self) -> Backend:
        self.on_make()
        if self.is_broken and len(self.made) % 2:
            raise OSError(2, "No such file", str(self.path / "m" / "1" / "model.stub"))
        self.made.append(StubBackend())
        return self.made[-1]

    def load(
        self,
        *,
        rows: int = 8,
        latest: int = 1,
        count: int = 1,
        spec: ModelSpec | None = None,
        more: str = "",
        pinned: Sequence[str] = (),
    ) -> LoadChange:
        self.generation += 1
        config = to_json(normalise(parse(CONFIG.format(rows=rows, latest=latest, count=count) + more), "m"))
        stored = StoredModel("m", self.generation, config, (1,))
        change = self.loader.load(spec or to_spec(from_json(config), LimitSettings()), 1, stored, self.serving, pinned)
        self.serving = change.loaded
        return change


def _clock() -> ServerClock:
    return ServerClock(FakeClock(), offset_s=0.0)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_what_has_not_changed_is_not_loaded(scene: Scene) -> None:
    """Another version's files and the version policy are none of this version's."""
    first = scene.load()
    scene.write("2/model.stub", "other")
    second = scene.load(latest=2)

    assert (first.kind, second.kind) == (LoadKind.NEW, LoadKind.SAME)
    assert len(scene.made) == 1
    assert second.loaded.generation == 2


def test_fields_of_optimization_without_effect_are_logged_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For all instances and reloads, and only those fields."""
    say_once.cache_clear()
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", CONFIG.replace('"stub"', '"pytorch"'))
    more = "optimization { graph { level: 1 } input_pinned_memory { enable: false } eager_batching: true }"

    scene.load(more=more, count=2)
    scene.write("1/model.stub", "other")
    scene.load(more=more, count=2)

    assert len(scene.made) == 4
    logged = [vars(record) for record in caplog.records if record.msg == "optimization has no effect"]
    assert [(record["model"], record["field"]) for record in logged] == [("m", "graph.level")]


@pytest.mark.parametrize("file", ["1/model.stub", "1/weights.bin", "labels.txt", "warmup/x"])
def test_any_file_that_it_may_read_counts(scene: Scene, file: str) -> None:
    """In the version's directory, and beside the versions."""
    scene.load()
    scene.write(file, "something new")

    assert scene.load().kind is LoadKind.NEW


def test_the_configuration_counts(scene: Scene) -> None:
    """But for how many instances there are: those are added, or end."""
    scene.load()
    more, fewer = scene.load(count=3), scene.load(count=2)
    other = scene.load(count=2, rows=4)

    assert [(change.kind, len(change.loaded.instances), change.surplus) for change in (more, fewer, other)] == [
        (LoadKind.RESIZED, 2, 0),
        (LoadKind.RESIZED, 0, 1),
        (LoadKind.NEW, 2, 0),
    ]


def test_what_is_executed_is_told_by_content(scene: Scene) -> None:
    """Not by times, other versions, batching, policies and samples, nor by what running a model leaves behind."""
    first = scene.load().loaded.executed_hash
    os.utime(scene.path / "m" / "1" / "model.stub", (1, 1))
    for file in ("2/model.stub", "warmup/x", "config.pbtxt", "configs/other.pbtxt", "1/__pycache__/model.pyc"):
        scene.write(file, "other")

    assert scene.load(rows=4, latest=2, count=3).loaded.executed_hash == first
    assert first.startswith("sha256:")


@pytest.mark.parametrize("file", ["1/model.stub", "1/weights.bin", "labels.txt", "tokenizer/words.txt"])
def test_content_that_may_be_executed_counts(scene: Scene, file: str) -> None:
    """In the version's directory, and beside the versions."""
    first = scene.load().loaded.executed_hash
    scene.write(file, "WEIGHTS")  # as many bytes as before

    assert scene.load().loaded.executed_hash != first


@pytest.mark.parametrize(
    ("line", "is_same"),
    [
        ('parameters { key: "beam" value { string_value: "4" } }', False),
        ('parameters { key: "qinfer.lane_capacity" value { string_value: "4" } }', True),
        ("optimization { graph { level: 1 } }", False),
        ("dynamic_batching { max_queue_delay_microseconds: 5 }", True),
        ('sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: 2 } }', False),
    ],
)
def test_the_configuration_s_executed_parts_count(scene: Scene, line: str, *, is_same: bool) -> None:
    """Parameters and optimisation do; how a version is scheduled does not."""
    first = scene.load().loaded.executed_hash

    assert (scene.load(more=line).loaded.executed_hash == first) is is_same


def test_files_are_read_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further load reads those whose size or time is another one."""
    scene.write("labels.txt", "a")
    digest, read = hashlib.file_digest, list[str]()

    def counted(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr("hashlib.file_digest", counted)
    scene.load()
    scene.load(count=2)
    scene.write("labels.txt", "b, c")
    scene.load()

    assert read == ["model.stub", "labels.txt", "labels.txt"]


def test_files_that_change_while_they_are_loaded_have_no_hash(scene: Scene) -> None:
    """What is in the instances may be the one or the other."""
    scene.on_make = lambda: scene.write("1/model.stub", "other weights")

    assert not scene.load().loaded.executed_hash


def test_other_content_than_was_pinned_is_not_loaded(scene: Scene) -> None:
    """Nothing is made of it; any content fits a pin that names none."""
    executed = scene.load().loaded.executed_hash
    scene.serving = None

    with pytest.raises(ModelLoadFailed, match="differ from the pinned ones"):
        scene.load(pinned=("sha256:other",))

    assert len(scene.made) == 1
    assert scene.load(pinned=("sha256:other", executed)).kind is LoadKind.NEW
    assert scene.load(rows=4, pinned=("",)).kind is LoadKind.NEW


def test_another_copy_of_the_same_remote_files_is_no_change(scene: Scene, tmp_path: Path) -> None:
    """A remote model whose `config.pbtxt` was written anew has a copy of its own."""
    cache, files = FilesCache(tmp_path / "cache"), LocalFiles(scene.path)
    copies: list[Path] = []

    def version_dir(model: str, version: int, location: str, content_hash: str) -> Path:
        copies.append(cache.version_dir(files, "s3://bucket", model, version))
        return copies[-1]

    scene.loader = Loader(version_dir, lambda _: scene._make, _clock())
    scene.load()
    scene.write("config.pbtxt", "# with more instances")

    assert scene.load(count=2).kind is LoadKind.RESIZED
    assert copies[0] != copies[1]


def test_instances_of_several_devices_are_not_taken_away_singly(scene: Scene) -> None:
    """Any idle one would end: the model is loaded anew instead. More of them are just added."""
    scene.loader.gpus = (0, 1)
    on = [InstanceSpec(device=Device("gpu", number), count=1) for number in (0, 1)]
    one, two = on[:1], on
    spec = stub_spec("m")

    def load(groups: list[InstanceSpec]) -> LoadKind:
        return scene.load(spec=_on(spec, groups)).kind

    assert [load(one), load(two), load(one)] == [LoadKind.NEW, LoadKind.RESIZED, LoadKind.NEW]


def _on(spec: ModelSpec, groups: list[InstanceSpec]) -> ModelSpec:
    return replace(spec, instances=tuple(groups))


def test_what_fails_leaves_nothing_behind_and_tells_no_path(scene: Scene) -> None:
    """Clients read the reason."""
    scene.is_broken = True

    with pytest.raises(ModelLoadFailed, match=r"^FileNotFoundError: .*'1/model.stub'$"):
        scene.load(count=2)

    assert [backend.loaded for backend in scene.made] == [False]


@pytest.mark.parametrize(
    ("allowed", "visible", "gpus"),
    [
        (None, None, (0, 1)),
        ((), None, ()),
        ((3, 1), "0", (1, 3)),
        (None, "", ()),
        (None, "4,2,GPU-abc", (0, 1, 2)),
        (None, "0,-1,1", (0,)),
    ],
)
def test_the_gpus_of_a_worker(
    tmp_path: Path, allowed: tuple[int, ...] | None, visible: str | None, gpus: tuple[int, ...]
) -> None:
    """What the setting says, or else what CUDA would see."""
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()

    assert gpus_here(allowed, visible, tmp_path) == gpus


def test_a_record_names_the_devices() -> None:
    """For people."""
    assert (named(()), named((0, 2))) == ("cpu", "cpu, gpu 0, gpu 2")


def test_instances_run_where_there_is_a_device_for_them() -> None:
    """Another worker may have the others."""
    groups = [
        InstanceSpec(device=Device("gpu", 0), count=2),
        InstanceSpec(device=Device("gpu", 1), count=2),
        InstanceSpec(count=1),
    ]
    spec = _on(stub_spec("m"), groups)

    assert devices_of(spec, (1,)) == (Device("gpu", 1), Device("gpu", 1), Device())
    assert devices_of(spec, ()) == (Device(),)
    with pytest.raises(ModelLoadFailed, match=r"^model 'm' needs GPU 0 or 1; this worker has GPU 2$"):
        devices_of(_on(spec, groups[:2]), (2,))


def test_what_can_not_be_unloaded_does_not_stop_the_rest(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A backend's mistake ends no worker."""
    change = scene.load(count=3)
    scene.made[0].unload = raise_busy  # type: ignore[method-assign]  # a backend with a mistake

    scene.loader.discard(change)

    assert caplog.messages == ["model instance not unloaded"]
    assert [made.loaded for made in scene.made] == [True, False, False]


STATE = StateSpec(input="si", output="so", datatype="FP32", dims=(2,), initial_dims=(2,), file="zero.bin")


def _stateful() -> ModelSpec:
    return replace(stub_spec("m"), sequences=SequenceSpec(strategy=DirectSpec(), slots=4, max_rows=4, states=(STATE,)))


@pytest.mark.parametrize(
    ("kept", "kind"),
    [
        ({}, LoadKind.RESIZED),
        ({"iterative": True}, LoadKind.NEW),
        ({"strategy": OldestSpec(preferred_sizes=(4,))}, LoadKind.NEW),
    ],
)
def test_instances_of_the_strategy_direct_come_and_go(scene: Scene, kept: dict[str, Any], kind: LoadKind) -> None:
    """Another model with sequences is loaded anew."""
    sequences = _stateful().sequences
    assert sequences is not None
    one = replace(_stateful(), sequences=replace(sequences, **kept))
    two = replace(one, instances=(InstanceSpec(count=2),))
    scene.write("initial_state/zero.bin", "12345678")
    scene.load(spec=one)

    assert scene.load(spec=one).kind is LoadKind.SAME
    more, fewer = scene.load(spec=two), scene.load(spec=one)

    is_new = kind is LoadKind.NEW
    assert (more.kind, len(more.loaded.instances), more.surplus) == (kind, 2 if is_new else 1, 0)
    assert (fewer.kind, len(fewer.loaded.instances), fewer.surplus) == (kind, int(is_new), int(not is_new))


def test_initial_states_are_read_from_files(scene: Scene) -> None:
    """One row of so many bytes as the state has; a file that changes is a new load, and executes something else."""
    scene.write("initial_state/zero.bin", "12345678, and more")
    first = scene.load(spec=_stateful())
    scene.write("initial_state/zero.bin", "87654321, and more")
    second = scene.load(spec=_stateful())

    assert first.loaded.initial_states == (Tensor("si", "FP32", (1, 2), b"12345678"),)
    assert second.kind is LoadKind.NEW
    assert second.loaded.executed_hash != first.loaded.executed_hash


@pytest.mark.parametrize(("content", "text"), [(None, "No such file"), ("1234", "only has 4 bytes")])
def test_a_file_that_is_no_initial_state_fails_the_load(scene: Scene, content: str | None, text: str) -> None:
    """The message names the file, and not where it is."""
    if content is not None:
        scene.write("initial_state/zero.bin", content)

    with pytest.raises(ModelLoadFailed, match=text) as failed:
        scene.load(spec=_stateful())

    assert "zero.bin" in failed.value.message
    assert str(scene.path) not in failed.value.message


def raise_busy() -> None:
    raise OSError("busy")

"""A real Label Studio and the whole server: projects with tasks, and predictions that appear on each of them."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import magika
import numpy as np
import pytest

from qinfer.core.api_keys import Scope, add_key
from qinfer.core.settings import LabelingSettings
from qinfer.labeling.exports import FORMATS, Task
from qinfer.labeling.mapping import Mapping
from qinfer.testing import wait_until
from qinfer_api.labeling.studio import LabelStudio as PushClient
from qinfer_api.labeling.studio import StudioAway, StudioRefused
from tests.e2e.conftest import Stack, running
from tests.support import labeling_models as models
from tests.support.label_studio import NO_LABEL_STUDIO, LabelStudio, is_there, label_studio

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not is_there(), reason=NO_LABEL_STUDIO),
]

ROOT = Path(__file__).parents[3]
FILES = (
    "README.md",
    "pyproject.toml",
    "Makefile",
    "qinfer/queue/lua/lanes/submit.lua",
    "qinfer/core/messages.py",
    "LICENSE",
)
THINGS = [(10, 20, 30, 60, 100), (60, 10, 90, 30, 200)]
PUSHED_WITHIN_S = 90.0

Tasks = list[dict[str, Any]]


class Scene(NamedTuple):
    """What runs.

    Attributes:
        studio: Label Studio.
        stack: The server, which wants API keys.
        key: One of them.
        pushed: A project whose predictions are pushed.
        later: Another one.
    """

    studio: LabelStudio
    stack: Stack
    key: str
    pushed: int
    later: int

    def backend(self, model: str) -> str:
        """Returns the URL that a project's ML backend has."""
        return f"http://{self.stack.address}/label-studio/{model}"

    def connect(self, project: int, model: str, **more: Any) -> dict[str, Any]:
        """Makes the server the project's ML backend."""
        basic = {"auth_method": "BASIC_AUTH", "basic_auth_user": "label-studio", "basic_auth_pass": self.key}
        reply = self.studio.connect(project, self.backend(model), **basic, **more)
        assert reply.status_code == 201, reply.text
        return dict(reply.json())

    def told(self, project: int, path: str = "", *, method: str = "GET") -> dict[str, Any]:
        """Returns what `/v1` says about the pushed predictions of a project."""
        url = f"http://{self.stack.address}/v1/label-studio/filetype/projects/{project}/tasks{path}"
        reply = httpx.request(method, url, headers={"authorization": f"Bearer {self.key}"}, timeout=30, trust_env=False)
        assert reply.is_success, reply.text
        return dict(reply.json())

    def add_webhook(self, project: int, *, key: str) -> None:
        """Registers the server for new tasks, as a project's settings do."""
        word = base64.b64encode(f"label-studio:{key}".encode()).decode()
        self.studio.call(
            "POST",
            "/api/webhooks/",
            {
                "project": project,
                "url": self.backend("filetype") + "/webhook",
                "send_payload": True,
                "send_for_all_actions": False,
                "actions": ["TASKS_CREATED"],
                "headers": {"Authorization": f"Basic {word}"},
            },
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("labeling")
    (folder / "studio").mkdir()
    mappings = folder / "mappings"
    mappings.mkdir()
    models.build(folder / "models")
    _, key = add_key(folder / "keys.json", "labelers", (Scope.INFER,), "")
    with label_studio(folder / "studio") as studio:
        pushed, later = (studio.project(title, models.FILE_TYPES_CONFIG) for title in ("pushed", "later"))
        models.write_mapping(mappings, "filetype", models.FILE_TYPES)
        models.write_mapping(mappings, "filetype-pushed", models.FILE_TYPES, project=[pushed, later], mode="push")
        models.write_mapping(mappings, "looker", models.IMAGES)
        settings = {
            "QINFER_AUTH__MODE": "keys",
            "QINFER_AUTH__KEYS_FILE": str(folder / "keys.json"),
            "QINFER_LABELING__MAPPINGS": str(mappings),
            "QINFER_LABELING__URL": studio.url,
            "QINFER_LABELING__TOKEN": studio.token,
            "QINFER_LABELING__CALL_TIMEOUT_S": "5",  # what was not taken is tried again after a few times that
        }
        with running(folder / "models", folder, **settings) as stack:
            yield Scene(studio, stack, key, pushed, later)


@pytest.fixture(scope="module")
def library() -> magika.Magika:
    return magika.Magika(prediction_mode=magika.PredictionMode.BEST_GUESS)


def contents() -> list[str]:
    """Returns the beginnings of real files."""
    return [(ROOT / name).read_text()[:1500] for name in FILES]


def check_file_types(found: dict[int, Tasks], tasks: dict[int, str], library: magika.Magika) -> None:
    """Checks that each task has one prediction, which is what the library says of its content."""
    assert set(found) == set(tasks)
    for task, content in tasks.items():
        expected = library.identify_bytes(content.encode()).prediction
        (prediction,) = found[task]
        (item,) = prediction["result"]
        assert (item["type"], item["from_name"], item["to_name"]) == ("choices", "filetype", "content")
        assert item["value"] == {"choices": [str(expected.dl.label)]}
        assert prediction["score"] == pytest.approx(expected.score, abs=1e-4)
        assert prediction["model_version"] == "filetype:1"


def by_id(studio: LabelStudio, project: int) -> dict[int, str]:
    return {int(task["id"]): task["data"]["content"] for task in studio.tasks(project)}


def test_predictions_appear_on_each_task(scene: Scene, library: magika.Magika) -> None:
    """Connected by Label Studio's own calls, asked for by its data manager: each task gets its own prediction, once."""
    studio = scene.studio
    project = studio.project("choices", models.FILE_TYPES_CONFIG)
    backend = scene.connect(project, "filetype")
    studio.add_tasks(project, [{"content": text} for text in contents() * 5])

    studio.retrieve(project)
    studio.retrieve(project)  # what is there already is not asked for

    assert backend["readable_state"] == "Connected"
    assert studio.call("GET", f"/api/ml/{backend['id']}/versions") == {"versions": ["filetype:1"]}
    tasks = by_id(studio, project)
    assert len(tasks) == 30
    check_file_types(studio.predictions(project), tasks, library)


def test_a_task_fails_alone(scene: Scene, library: magika.Magika) -> None:
    """The others have their predictions; Label Studio logs why that one has none, and asks for it again later."""
    studio = scene.studio
    project = studio.project("fails", models.FILE_TYPES_CONFIG)
    scene.connect(project, "filetype")
    studio.add_tasks(project, [{"content": text} for text in (contents()[0], models.POISON, contents()[1])])
    mended = {"data": {"content": contents()[2]}}

    studio.retrieve(project)

    tasks = by_id(studio, project)
    (bad,) = [task for task, content in tasks.items() if content == models.POISON]
    scored = {task: content for task, content in tasks.items() if task != bad}
    check_file_types(studio.predictions(project), scored, library)
    assert models.NOT_SCORED in studio.process.log.read_text()
    studio.call("PATCH", f"/api/tasks/{bad}/", mended)
    studio.retrieve(project)
    check_file_types(studio.predictions(project), {**scored, bad: contents()[2]}, library)


def test_boxes_and_texts_of_files_that_label_studio_keeps(scene: Scene) -> None:
    """An uploaded image is fetched with the token; one that a task holds itself needs no fetching."""
    studio = scene.studio
    image = models.png(120, 80, THINGS)
    project = studio.project("images", models.IMAGES_CONFIG)
    scene.connect(project, "looker")
    uploaded = studio.upload(project, "things.png", image)
    within = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    (inline,) = studio.add_tasks(project, [{"image": within}])

    studio.retrieve(project)

    found = studio.predictions(project)
    assert set(found) == {uploaded, inline}
    for prediction in (found[uploaded][0], found[inline][0]):
        dog, cat, caption = prediction["result"]  # the surest first
        assert [cat["value"]["rectanglelabels"], dog["value"]["rectanglelabels"]] == [["cat"], ["dog"]]
        assert [dog["value"][edge] for edge in ("x", "y", "width", "height")] == pytest.approx([50, 12.5, 25, 25])
        assert [cat["value"][edge] for edge in ("x", "y", "width", "height")] == pytest.approx(
            [100 * 10 / 120, 25, 100 * 20 / 120, 50], abs=1e-4
        )
        assert {(cat["original_width"], cat["original_height"]), (dog["original_width"], dog["original_height"])} == {
            (120, 80)
        }
        assert caption["value"] == {"text": ["2 things on 120 by 80 pixels"]}
        assert prediction["model_version"] == "looker:1"


def test_opening_a_task_asks_for_its_prediction(scene: Scene, library: magika.Magika) -> None:
    """As an annotator does who opens a task that has none yet."""
    studio = scene.studio
    project = studio.project("opened", models.FILE_TYPES_CONFIG)
    scene.connect(project, "filetype")
    (task,) = studio.add_tasks(project, [{"content": contents()[0]}])

    studio.call("GET", f"/api/tasks/{task}/")

    check_file_types(studio.predictions(project), {task: contents()[0]}, library)


def test_a_person_who_waits_is_told(scene: Scene) -> None:
    """An interactive backend answers about one task, and says why it can't."""
    studio = scene.studio
    project = studio.project("interactive", models.FILE_TYPES_CONFIG)
    backend = scene.connect(project, "filetype", is_interactive=True)["id"]
    good, bad = studio.add_tasks(project, [{"content": text} for text in (contents()[0], models.POISON)])

    answered, refused = studio.annotate(backend, good), studio.annotate(backend, bad)

    assert answered["data"]["result"][0]["value"] == {"choices": ["markdown"]}
    assert "data" not in refused
    assert "Server Error" in refused["errors"][0] or "Client Error" in refused["errors"][0]


def test_files_of_pre_annotations_are_imported(scene: Scene) -> None:
    """What the exports write for Label Studio is what it imports: choices, boxes, texts."""
    studio = scene.studio
    texts = studio.project("exported texts", models.FILE_TYPES_CONFIG)
    images = studio.project("exported images", models.IMAGES_CONFIG)
    outputs: dict[str, Any] = {
        "BOXES": np.array([[10.0, 20.0, 30.0, 60.0]]),
        "SCORES": np.array([0.75]),
        "CLASS": np.array([1]),
        "SIZE": np.array([120, 80]),
        "CAPTION": np.array([b"a dog"], dtype=object),
    }
    text_outputs = {"LABEL": np.array([b"markdown"], dtype=object), "SCORE": np.array([0.5])}

    studio.add(texts, [exported(models.FILE_TYPES, {"content": "# Title"}, text_outputs)])
    studio.add(images, [exported(models.IMAGES, {"image": "https://example.org/a.png"}, outputs)])

    ((text,),) = studio.predictions(texts).values()
    ((image,),) = studio.predictions(images).values()
    assert (text["score"], text["model_version"]) == (0.5, "filetype:3")
    assert text["result"][0]["value"] == {"choices": ["markdown"]}
    assert (image["score"], image["model_version"]) == (0.75, "looker:3")
    assert [item["type"] for item in image["result"]] == ["rectanglelabels", "textarea"]


def exported(mapping: dict[str, Any], data: dict[str, Any], outputs: dict[str, Any]) -> dict[str, Any]:
    """Returns a task with its prediction as the export writes it."""
    labels = Mapping.model_validate({"name": "exported", **mapping})
    prediction = labels.prediction_of({"id": 1, "data": data}, outputs, f"{labels.model}:3")
    return dict(json.loads(FORMATS["label-studio"].encode(labels, Task(1, 1, data, prediction))))


def test_what_does_not_fit_is_not_connected(scene: Scene) -> None:
    """Neither with a wrong key, nor to a model that is not there, nor to a label config that the mapping is not for."""
    studio = scene.studio
    project = studio.project("unfit", models.IMAGES_CONFIG)
    basic = {"auth_method": "BASIC_AUTH", "basic_auth_user": "label-studio"}

    wrong_key = studio.connect(project, scene.backend("looker"), **basic, basic_auth_pass="wrong")
    no_model = studio.connect(project, scene.backend("nothing"), **basic, basic_auth_pass=scene.key)
    unfit = studio.connect(project, scene.backend("filetype"), **basic, basic_auth_pass=scene.key)

    assert (wrong_key.status_code, no_model.status_code, unfit.status_code) == (400, 400, 400)
    assert "authentication parameters were either not provided or are incorrect" in wrong_key.text
    assert "health check failed" in no_model.text
    assert "valid ML backend" in unfit.text


def test_predictions_are_pushed(scene: Scene, library: magika.Magika) -> None:
    """New tasks are told by the webhook; predictions appear, though nobody asks; a task that fails says why."""
    studio, project = scene.studio, scene.pushed
    scene.add_webhook(project, key=scene.key)
    scene.connect(project, "filetype")
    assert len(studio.call("GET", "/api/webhooks/", project=project)) == 1  # the one with the key stays the only one
    studio.add_tasks(project, [{"content": text} for text in (*contents() * 10, models.POISON)])

    wait_until(until_over(scene, project, 61), PUSHED_WITHIN_S, lambda: str(scene.told(project)["counts"]))

    tasks = by_id(studio, project)
    (bad,) = [task for task, content in tasks.items() if content == models.POISON]
    scored = {task: content for task, content in tasks.items() if task != bad}
    assert len(scored) == 60
    check_file_types(studio.predictions(project), scored, library)
    told = scene.told(project, "?limit=1000")
    assert told["counts"] == {"queued": 0, "processing": 0, "sending": 0, "done": 60, "failed": 1}
    assert [task["task"] for task in told["tasks"]] == sorted(tasks)
    failed = scene.told(project, f"/{bad}")
    assert failed["state"] == "failed"
    assert models.NOT_SCORED in failed["error"]

    studio.call("PATCH", f"/api/tasks/{bad}/", {"data": {"content": contents()[0]}})
    assert scene.told(project, method="POST") == {"found": 1, "queued": 1, "next": None}
    wait_until(lambda: scene.told(project, f"/{bad}")["state"] == "done", PUSHED_WITHIN_S, "the mended task")
    check_file_types(studio.predictions(project), {**scored, bad: contents()[0]}, library)


def test_label_studio_dies_and_comes_back(scene: Scene, library: magika.Magika) -> None:
    """Predictions wait for it; then each is there once, those too that were under way when it died."""
    studio, project = scene.studio, scene.later
    scene.add_webhook(project, key=scene.key)
    studio.add_tasks(project, [{"content": text} for text in contents() * 10])
    tasks = by_id(studio, project)
    studio.process.kill()
    try:
        wait_until(lambda: told_away(scene, project), PUSHED_WITHIN_S, lambda: str(scene.told(project)))
    finally:
        studio.process.start()

    wait_until(until_over(scene, project, 60), PUSHED_WITHIN_S, lambda: str(scene.told(project)["counts"]))

    check_file_types(studio.predictions(project), tasks, library)


def told_away(scene: Scene, project: int) -> bool:
    """Tells whether all tasks are scored, and one at least waits for Label Studio."""
    told = scene.told(project, "?limit=1000")
    waiting = [task for task in told["tasks"] if task["state"] == "sending" and task["error"]]
    return told["counts"]["queued"] == told["counts"]["processing"] == 0 and "can't be reached" in str(waiting)


def until_over(scene: Scene, project: int, count: int) -> Callable[[], bool]:
    """Returns what tells that so many tasks are done or have failed."""
    return lambda: sum(scene.told(project)["counts"][state] for state in ("done", "failed")) == count


async def test_both_kinds_of_tokens_open_label_studio(scene: Scene) -> None:
    """A personal access token is exchanged, a legacy token is sent; a wrong one is told, and kept for later."""
    project = scene.studio.project("tokens", models.FILE_TYPES_CONFIG)
    (task,) = scene.studio.add_tasks(project, [{"content": "text"}])
    for token in (scene.studio.token, scene.studio.legacy_token):
        settings = LabelingSettings.model_validate({"url": scene.studio.url, "token": token})
        client = PushClient(settings)
        assert await client.label_config(project) == models.FILE_TYPES_CONFIG
        assert ([each["id"] for each in (await client.tasks(project, 1))[0]], task) == ([task], task)
        with pytest.raises(StudioRefused):
            await client.task(10**6)
        await client.close()
    wrong = PushClient(LabelingSettings.model_validate({"url": scene.studio.url, "token": "wrong"}))
    with pytest.raises(StudioAway, match="does not take the token"):
        await wrong.tasks(project, 1)
    await wrong.close()

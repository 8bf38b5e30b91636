"""The bridge's configuration file: what it may say, and how mistakes in it are named."""

from pathlib import Path
from typing import Any

import pytest

from qinfer.errors import SettingsError
from qinfer_workers.bridge.config import load_config, parse_config

YAML = """
retry_s: 5
routes:
  - name: digits
    model: digits
    source: {url: "amqp://guest:${RABBIT_PASSWORD}@localhost//", queue: tasks}
    sink: {routing_key: predictions}
    body: {input: IMAGE, columns: {IMAGE: [a, b]}}
"""
TOML = """
retry_s = 5
[[routes]]
name = "digits"
model = "digits"
source = {url = "amqp://guest:${RABBIT_PASSWORD}@localhost//", queue = "tasks"}
sink = {routing_key = "predictions"}
body = {input = "IMAGE", columns = {IMAGE = ["a", "b"]}}
"""
SECRET = "pass/word@1"
EXAMPLES = Path(__file__).resolve().parents[4] / "examples/bridge"


def document(**route: Any) -> dict[str, Any]:
    one = {"name": "digits", "model": "digits", "source": {"url": "amqp://broker//", "queue": "tasks"}}
    return {"routes": [one | route]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_can_be_read(path: Path) -> None:
    assert load_config(path, {"RABBIT_PASSWORD": SECRET, "LIST_PASSWORD": SECRET}).routes


@pytest.mark.parametrize(("name", "text"), [("routes.yaml", YAML), ("routes.yml", YAML), ("routes.toml", TOML)])
def test_yaml_and_toml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    """Defaults are filled in, and a password comes from the environment, quoted as URLs need it."""
    path = tmp_path / name
    path.write_text(text)

    config = load_config(path, {"RABBIT_PASSWORD": SECRET})

    (route,) = config.routes
    assert (config.retry_s, config.result_ttl_s, config.metrics_port) == (5, 86400, 0)
    assert route.source_url == route.sink_url == "amqp://guest:pass%2Fword%401@localhost//"
    assert (route.dead_letters, route.outbox, route.source.prefetch) == ("tasks.dead", "bridge:digits", 500)
    assert route.body.columns["IMAGE"] == ("a", "b")
    assert SECRET not in repr(config)
    assert "%40" not in repr(config)


def test_a_variable_may_be_the_whole_url() -> None:
    """Then it is taken as it is, and so are those of transport options."""
    sqs = {"predefined_queues": {"tasks": {"secret_access_key": "${KEY}"}}}
    source = {"url": "${BROKER}", "queue": "tasks", "options": sqs}

    config = parse_config(document(source=source), {"BROKER": "sqs://", "KEY": SECRET})

    assert config.routes[0].source_url == "sqs://"
    assert config.routes[0].source.options["predefined_queues"]["tasks"]["secret_access_key"] == SECRET


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (document(name="Digits"), "route 'Digits'.name: use up to 64 of a-z, 0-9 and '-'"),
        (document(modell="x"), "route 'digits'.modell: there is no such field"),
        (document(timeout_s=0), "route 'digits'.timeout_s: expected more than 0, got 0"),
        (document(source={"queue": "tasks"}), "route 'digits'.source.url: it is missing"),
        (document(source={"url": "http://x", "queue": "q"}), "route 'digits'.source.url: expected a URL of kombu"),
        (document(source={"url": "amqp://b//", "queue": "q", "prefetch": 0}), "route 'digits'.source.prefetch"),
        (document(source={"url": "amqp://${NONE}//", "queue": "q"}), "source.url: the environment has no NONE"),
        (document(sink={"reply_to": False}), "route 'digits'.sink: predictions have nowhere to go"),
        (document(sink={"routing_key": "tasks"}), "must be three queues"),
        (document(dead_letter="tasks"), "must be three queues"),
        (document(sink={"routing_key": "tasks.dead"}), "must be three queues"),
        (document(body={"reply": "xml"}), "route 'digits'.body.reply"),
        (document(responses="all"), "route 'digits'.responses: expected 'one' or 'each', got 'all'"),
        (
            document(source={"url": "amqp://b//", "queue": "q", "prefetch": "lots"}),
            "expected a whole number, got 'lots'",
        ),
        (document(source={"url": "amqp://b//", "queue": "ü" * 128}), "route 'digits'.source.queue: it takes 256 bytes"),
        (document(source={"url": "amqp://b//", "queue": "q" * 251}), "for dead letters: it takes 256 bytes"),
        ({"routes": {"name": "digits"}}, "routes: expected a list"),
        ({"routes": document()["routes"] * 2}, "two routes are called digits"),
        ({"routes": []}, "routes: expected at least 1 entry"),
        ({}, "routes: it is missing"),
        ({"routes": ["x"]}, "route 1: "),
        ([], "expected a mapping with 'routes'"),
        (document() | {"metrics_port": 70000}, "metrics_port: expected at most 65535"),
    ],
)
def test_mistakes_are_named_with_their_route_and_field(given: Any, problem: str) -> None:
    """The one who has to mend it knows where to look."""
    with pytest.raises(SettingsError, match=r"^configuration: ") as caught:
        parse_config(given, {})

    assert problem in caught.value.message


def test_a_mistake_in_the_only_route_is_named_alone() -> None:
    """The list of routes is not called too short besides."""
    with pytest.raises(SettingsError) as caught:
        parse_config(document(timeout_s=0), {})

    assert "at least 1 item" not in caught.value.message


@pytest.mark.parametrize(
    ("first", "second", "is_circle"),
    [
        ({"dead_letter": "b"}, {"dead_letter": "a"}, True),
        ({"sink": {"routing_key": "b"}}, {"dead_letter": "a"}, True),
        ({"sink": {"routing_key": "b"}}, {"sink": {"routing_key": "a", "url": "amqp://elsewhere//"}}, False),
        ({"sink": {"routing_key": "b"}}, {"sink": {"routing_key": "a", "exchange": "e"}}, False),
        ({"sink": {"routing_key": "b"}}, {}, False),
        ({"dead_letter": "b"}, {}, False),
    ],
)
def test_what_is_refused_comes_back_by_no_other_route(
    first: dict[str, Any], second: dict[str, Any], *, is_circle: bool
) -> None:
    """It would go round for ever; a chain of routes is well."""
    routes = [
        {"name": name, "model": "m", "source": {"url": "amqp://broker//", "queue": name}, **more}
        for name, more in (("a", first), ("b", second))
    ]
    if not is_circle:
        assert len(parse_config({"routes": routes}, {}).routes) == 2
        return
    with pytest.raises(SettingsError, match="return to its queue 'a' by way of other routes"):
        parse_config({"routes": routes}, {})


def test_a_sink_elsewhere_may_have_a_queue_of_the_same_name() -> None:
    """It is another queue."""
    config = parse_config(document(sink={"url": "redis://localhost/1", "routing_key": "tasks"}), {})

    assert config.routes[0].sink_url == "redis://localhost/1"


def test_no_message_has_a_password() -> None:
    """Whatever is wrong with the URL that it is in."""
    for url in (f"http://guest:{SECRET}@b//", f"amqp:/guest:{SECRET}@b//", "amqp://guest:word/and@b//"):
        with pytest.raises(SettingsError) as caught:
            parse_config(document(source={"url": url, "queue": "q"}, timeout_s=-1), {})
        assert SECRET not in caught.value.message
        assert "word" not in caught.value.message.replace("password", "")

    options = {"predefined_queues": {"q": {"secret_access_key": SECRET}}}
    config = parse_config(document(source={"url": "sqs://", "queue": "q", "options": options}), {})
    assert SECRET not in repr(config)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("routes.json", b"{}", "expected a name that ends with .yaml, .yml or .toml"),
        ("routes.yaml", b"routes: [", "can't be read: line 1"),
        ("routes.toml", b"routes = [", "can't be read"),
        ("routes.yaml", b"\xff\xfe\x00", "can't be read"),
        ("routes.yaml", b"a: " + b"x" * 2**20, "larger than 1048576 bytes"),
    ],
)
def test_files_that_can_not_be_read_are_refused(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    """With what is expected instead."""
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(SettingsError) as caught:
        load_config(path, {})

    assert problem in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"gone\.yaml: No such file"):
        load_config(tmp_path / "gone.yaml", {})

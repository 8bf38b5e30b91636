"""`qinfer models`: the model repository and the desired state."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qinfer.cli.console import (
    DEFAULT_URL,
    FAILED,
    UNREACHABLE,
    CommandFailed,
    Commands,
    DataDirOption,
    JsonOption,
    ModelArgument,
    RedisOption,
    UrlOption,
    gateway_client,
    print_error,
    show,
    state,
    table,
)
from qinfer.errors import ControlDisabled
from qinfer.wire.bodies import index_body

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qinfer.core.settings import RedisSettings
    from qinfer.models.sync import SyncedModel

app = Commands(
    help="Manage models: check, sync with a repository, list, load, unload, pause, resume.", no_args_is_help=True
)

CHECK_EXAMPLE = "Example: qinfer models check ./models   or   qinfer models check app.py"

SYNC_EXAMPLE = "Example: qinfer models sync --model-repository ./models"
LIST_EXAMPLE = "Example: qinfer models list --json"
INDEX_EXAMPLE = "Example: qinfer models index --ready"
LOAD_EXAMPLE = (
    "Example: qinfer models load digits   or   "
    "qinfer models load digits --config config.json --file 1/model.onnx=new.onnx"
)
UNLOAD_EXAMPLE = "Example: qinfer models unload digits"
PAUSE_EXAMPLE = "Example: qinfer models pause digits --reason 'the feature store is down'"
RESUME_EXAMPLE = "Example: qinfer models resume digits"
PAUSES_EXAMPLE = "Example: qinfer models pauses"

VersionOption = Annotated[
    int, typer.Option("--version", min=0, show_default=False, help="Only this version; default: all versions.")
]

RepositoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-repository",
        "-m",
        help="Directory or URL of a model repository; repeatable. Default: QINFER_REPOSITORY__PATH, or "
        "models unless an app is given.",
    ),
]


@app.command("check", epilog=CHECK_EXAMPLE, short_help="Show completed configurations and errors, without a server.")
def check_models(
    place: Annotated[
        str, typer.Argument(metavar="DIR", help="A model repository, or app.py, app.py:Embed, a package's directory.")
    ],
    *,
    as_json: JsonOption = False,
) -> None:
    """Read a model repository, or an app, without a server: show each model's completed configuration, or its error.

    It imports an app, and runs auto_complete_config of model.py. Exit codes: 0 all models are usable, 1 one is not.
    """
    from qinfer.cli.checks.models import check_place

    checked = check_place(place)
    text = "\n".join(f"# {each.model}, version {each.version}\n{each.config}" for each in checked if not each.error)
    if text or as_json:
        show(checked, text, as_json=as_json)
    for each in checked:
        if each.error:
            print_error(f"model '{each.model}': {each.error}")
    if any(each.error for each in checked):
        raise typer.Exit(FAILED)


@app.command("sync", epilog=SYNC_EXAMPLE, short_help="Load new and changed models, unload removed ones.")
def sync_models(
    *,
    model_repository: RepositoryOption = None,
    may_empty: Annotated[
        bool,
        typer.Option("--may-empty", help="Unload all models if the repository is empty; without it that is an error."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until the models are ready on a worker.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="With --wait: the most seconds to wait.")] = 600.0,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Make a repository's content the desired state: load new and changed models, unload removed models.

    Exit codes: 0 done (with --wait: all models are ready), 1 a model can't be read, or with --wait can't be loaded, 69
    with --wait: a model is not ready in time.
    """
    from qinfer.cli.overview import redis_settings, run_sync
    from qinfer.core.settings import load_settings

    repository = load_settings().repository
    if model_repository:
        repository = repository.model_copy(update={"path": ",".join(model_repository)})
    settings = redis_settings(redis, data_dir)
    synced = run_sync(settings, repository, may_empty=may_empty)
    rows = [(m.model, ", ".join(map(str, m.versions)) or "-", str(m.generation), m.error or _result(m)) for m in synced]
    show(synced, lambda: table("Synced", "model, versions, generation>, result", rows), as_json=as_json)
    failed = {model.model: f"can't be read: {model.error}" for model in synced if model.error}
    late = _wait(settings, synced, timeout, failed) if wait else {}
    for name, reason in (failed | late).items():
        print_error(f"model '{name}' {reason}")
    if failed or late:
        raise typer.Exit(FAILED if failed else UNREACHABLE)


def _result(model: "SyncedModel") -> str:
    return "removed" if model.removed else "written" if model.changed else "unchanged"


def _wait(
    settings: "RedisSettings", synced: "list[SyncedModel]", timeout_s: float, failed: dict[str, str]
) -> dict[str, str]:
    from qinfer.cli.overview import run_wait
    from qinfer.models.readiness import LoadProgress

    late = {}
    for name, (progress, reason) in run_wait(settings, synced, timeout_s).items():
        if progress is LoadProgress.WAITING:
            late[name] = f"is not ready after {timeout_s:g} s: {reason}"
        elif progress is LoadProgress.FAILED:
            failed.setdefault(name, f"can't be loaded: {reason}")
    return late


@app.command("list", epilog=LIST_EXAMPLE)
def list_models(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """List the models with their versions, state and sequences.

    JSON has the models only: `qinfer status --json` has the sequences, too.
    """
    from qinfer.cli.overview import redis_settings, run_overview
    from qinfer.cli.tables import models_tables

    overview = run_overview(redis_settings(redis, data_dir))
    show(overview.models, lambda: models_tables(overview), as_json=as_json)


@app.command("index", epilog=INDEX_EXAMPLE, short_help="Show every model of the repositories.")
def show_index(
    *,
    ready: Annotated[bool, typer.Option("--ready", help="Show only versions that are ready.")] = False,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Show every model of the repositories and the state of its versions, as reported by a gateway."""
    with gateway_client(url) as client:
        found = client.index(ready=ready)
    entries = index_body(found)
    show(entries, lambda: table("Index", "model, version>, state, reason", map(_index_row, entries)), as_json=as_json)


def _index_row(entry: Mapping[str, str]) -> "tuple[object, ...]":
    reason = entry.get("reason", "") if entry.get("state") else "never loaded"
    return entry["name"], entry.get("version") or "-", state(entry.get("state") or "-"), reason


@app.command("load", epilog=LOAD_EXAMPLE, short_help="Load a model, or its changes.")
def load_model(
    model: ModelArgument,
    *,
    config: Annotated[
        str, typer.Option(help="JSON configuration (a file, or the text) that replaces the model's config.pbtxt.")
    ] = "",
    files: Annotated[
        list[str] | None,
        typer.Option(
            "--file", help="VERSION/NAME=FILE: replaces all files of the model in the repository; requires --config."
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until the model is ready.")] = 600.0,
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Load a model, or reload it if it has changed, and wait until it is ready. Requires control mode explicit."""
    text = config if config.lstrip().startswith("{") else _read_text(config) if config else None
    contents: dict[str, bytes] = {}
    for entry in files or []:
        name, _, path = entry.partition("=")
        if not path:
            raise CommandFailed(f"--file {entry}: write VERSION/NAME=FILE, such as 1/model.onnx=new.onnx")
        contents[name] = _read_file(path)
    with gateway_client(url, timeout_s=timeout) as client, _with_remedy():
        client.load(model, config=text, files=contents)
    show({"loaded": model}, f"{model} is loaded", as_json=as_json)


@app.command("unload", epilog=UNLOAD_EXAMPLE, short_help="Unload a model.")
def unload_model(model: ModelArgument, *, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """Unload a model: new requests are refused, waiting requests are answered. Requires control mode explicit."""
    with gateway_client(url) as client, _with_remedy():
        client.unload(model)
    show({"unloaded": model}, f"{model} is unloaded", as_json=as_json)


@app.command("pause", epilog=PAUSE_EXAMPLE, short_help="Pause a model: its requests wait.")
def pause_model(
    model: ModelArgument,
    *,
    version: VersionOption = 0,
    reason: Annotated[str, typer.Option("--reason", help="Why; callers of the model see it.")] = "",
    url: UrlOption = DEFAULT_URL,
    as_json: JsonOption = False,
) -> None:
    """Pause a model until it is resumed: workers take none of its requests and shards, also after restarts.

    Synchronous requests are refused with 503. Stored requests are accepted and wait; their deadlines go on. Work that
    has begun is finished. Requires the scope admin.
    """
    with gateway_client(url) as client:
        found = client.change_pause(model, version, "pause", reason)
    show(found, lambda: _pauses(found), as_json=as_json)


@app.command("resume", epilog=RESUME_EXAMPLE, short_help="Resume a paused model.")
def resume_model(
    model: ModelArgument, *, version: VersionOption = 0, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False
) -> None:
    """Resume a paused model; a pause of one version is resumed with its --version. Requires the scope admin."""
    with gateway_client(url) as client:
        found = client.change_pause(model, version, "resume")
    show(found, lambda: _pauses(found), as_json=as_json)


@app.command("pauses", epilog=PAUSES_EXAMPLE)
def list_pauses(*, url: UrlOption = DEFAULT_URL, as_json: JsonOption = False) -> None:
    """List the paused models: since when, by whom and why."""
    with gateway_client(url) as client:
        found = client.pauses()
    show(found, lambda: _pauses(found), as_json=as_json)


def _pauses(found: "list[dict[str, Any]]") -> "RenderableType":
    rows = [(one["model"], one["version"] or "all", one["since"], one["by"] or "-", one["reason"]) for one in found]
    return table("Paused", "model, version>, since, by, reason", rows)


@contextlib.contextmanager
def _with_remedy() -> Iterator[None]:
    """Adds the remedy to Triton's refusal of load requests."""
    try:
        yield
    except ControlDisabled as error:
        remedy = (
            "start the server with --model-control-mode explicit, or change the repository and `qinfer models sync`"
        )
        raise CommandFailed(f"{error.message}; {remedy}") from None


def _read_file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CommandFailed(f"{path} can't be read: {error.strerror}") from None


def _read_text(path: str) -> str:
    try:
        return _read_file(path).decode()
    except UnicodeDecodeError:
        raise CommandFailed(f"{path} is not text; --config takes a model configuration in JSON") from None

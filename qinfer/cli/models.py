"""`qinfer models`: the model repository and the desired state."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import JsonOption, print_json
from qinfer.cli.status import DataDirOption, RedisOption, models_table

if TYPE_CHECKING:
    from qinfer.control.sync import SyncedModel

app = typer.Typer(help="The models: write the desired state from a repository, list it.", no_args_is_help=True)

SYNC_EXAMPLE = "Example: qinfer models sync --model-repository ./models"
LIST_EXAMPLE = "Example: qinfer models list --json"


@app.command("sync", epilog=SYNC_EXAMPLE)
def sync_models(
    *,
    model_repository: Annotated[
        Path,
        typer.Option("--model-repository", "-m", envvar="QINFER_REPOSITORY__PATH", help="Directory of the models."),
    ] = Path("models"),
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Read a repository and tell everyone: new and changed models are loaded, models that are gone unloaded."""
    from qinfer.cli.overview import redis_settings, run_sync

    synced = run_sync(redis_settings(redis, data_dir), model_repository)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(synced))
    else:
        _print_synced(synced)


@app.command("list", epilog=LIST_EXAMPLE)
def list_models(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """List the models with their versions and state."""
    import msgspec
    from rich.console import Console

    from qinfer.cli.overview import redis_settings, run_overview

    overview = run_overview(redis_settings(redis, data_dir))
    if as_json:
        print_json(msgspec.to_builtins(overview.models))
    else:
        Console().print(models_table(overview))


def _print_synced(synced: "list[SyncedModel]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("model", "versions", "generation", "what happened", title="Synced", title_justify="left")
    for model in synced:
        what = "removed" if model.removed else "written" if model.changed else "unchanged"
        versions = ", ".join(map(str, model.versions)) or "-"
        table.add_row(model.model, versions, str(model.generation), Text(model.error or what))
    Console().print(table)

"""`qinfer keys`: API keys for `QINFER_AUTH__MODE=keys`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import JsonOption, print_json

app = typer.Typer(help="Manage API keys.", no_args_is_help=True)

EXAMPLE = "Example: qinfer keys new --tenant acme --file keys.json"


class ScopeName(StrEnum):
    """The scopes of a key."""

    infer = "infer"
    admin = "admin"


@app.command("new", epilog=EXAMPLE)
def new_key(
    *,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Tenant of the key: letters, digits and ._~-")],
    scopes: Annotated[
        list[ScopeName] | None,
        typer.Option(
            "--scope",
            "-s",
            help="Scope of the key, repeatable: infer (the default), or admin, which allows everything.",
        ),
    ] = None,
    file: Annotated[
        Path,
        typer.Option("--file", "-f", envvar="QINFER_AUTH__KEYS_FILE", help="The key file; created if missing."),
    ] = Path("keys.json"),
    key_id: Annotated[str, typer.Option("--id", help="Name of the key in the file; default: a random one.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Create an API key: print it once, and add its hash to the key file.

    Quotas are edited in the file: `rate_per_s`, `burst` and `max_in_flight`, where 0 means no limit; they are the
    same for all keys of a tenant. Gateways read the file at start.
    """
    from rich.console import Console
    from rich.text import Text

    from qinfer.core.api_keys import Scope, add_key

    wanted = tuple(Scope(scope.value) for scope in dict.fromkeys(scopes or [ScopeName.infer]))
    entry, key = add_key(file, tenant, wanted, key_id)
    if as_json:
        print_json({"id": entry.id, "tenant": entry.tenant, "scopes": list(entry.scopes), "key": key})
        return
    note = f"Key '{entry.id}' of tenant '{entry.tenant}' was added to {file}. This is the only time it is shown:"
    Console(stderr=True, soft_wrap=True).print(Text(note))
    print(key)

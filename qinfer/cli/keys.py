"""`qinfer keys`: API keys for `QINFER_AUTH__MODE=keys`."""

import re
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qinfer.cli.console import Commands, JsonOption, print_json, show, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qinfer.core.api_keys import ApiKey

app = Commands(help="Manage API keys: gateways follow the key file within 2 seconds.", no_args_is_help=True)

EXAMPLE = "Example: qinfer keys new --tenant acme --expires 90d --file keys.json"
ROTATION = "Example: qinfer keys rotate acme-1f0c33d2 --overlap 24h --file keys.json"

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

FileOption = Annotated[
    Path, typer.Option("--file", "-f", envvar="QINFER_AUTH__KEYS_FILE", help="The key file; `new` creates it.")
]


class ScopeName(StrEnum):
    """The scopes of a key."""

    viewer = "viewer"
    infer = "infer"
    admin = "admin"


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,6})([smhd])", text.strip())
    if found is None:
        raise typer.BadParameter(f"'{text}' is not a duration, such as 90d, 24h, 30m or 10s")
    return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


@app.command("new", epilog=EXAMPLE)
def new_key(
    *,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Tenant of the key: letters, digits and ._~-")],
    scopes: Annotated[
        list[ScopeName] | None,
        typer.Option(
            "--scope",
            "-s",
            help="Scope of the key, repeatable: viewer, which sees states and figures; infer, the default, which also "
            "uses models; admin, which allows everything.",
        ),
    ] = None,
    file: FileOption = Path("keys.json"),
    key_id: Annotated[str, typer.Option("--id", help="Name of the key in the file; default: a random one.")] = "",
    expires: Annotated[
        str, typer.Option("--expires", help="Time from now until the key expires, such as 90d; default: never.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Create an API key: print it once, and keep its hash in the file.

    Quotas are edited in the file: `rate_per_s`, `burst` and `max_in_flight`, where 0 means no limit, and `weight`, the
    tenant's share; they are the same for all keys of a tenant. Gateways follow the file within 2 seconds.
    """
    from qinfer.core.api_keys import Scope, add_key

    wanted = tuple(Scope(scope.value) for scope in dict.fromkeys(scopes or [ScopeName.infer]))
    expires_at = datetime.now(UTC).replace(microsecond=0) + _duration(expires) if expires else None
    entry, key = add_key(file, tenant, wanted, key_id, expires_at=expires_at)
    _show_once(entry, key, f"Key '{entry.id}' of tenant '{entry.tenant}' was added to {file}.", as_json=as_json)


@app.command("list")
def list_keys(*, file: FileOption = Path("keys.json"), as_json: JsonOption = False) -> None:
    """List the keys of a key file: names, rights and validity. The keys themselves are not stored."""
    from qinfer.core.api_keys import read_keys

    rows = [_row(key) for key in read_keys(file)]
    show(rows, lambda: _table(rows), as_json=as_json)


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Name of the key; `qinfer keys list` shows it.")],
    *,
    file: FileOption = Path("keys.json"),
    as_json: JsonOption = False,
) -> None:
    """Revoke a key: remove it from the key file. Within 2 seconds all gateways refuse it, on open streams too."""
    from qinfer.core.api_keys import revoke_key

    entry = revoke_key(file, key_id)
    show(_row(entry), f"Key '{entry.id}' of tenant '{entry.tenant}' was removed from {file}.", as_json=as_json)


@app.command("rotate", epilog=ROTATION)
def rotate(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Name of the old key; `qinfer keys list` shows it.")],
    *,
    overlap: Annotated[str, typer.Option("--overlap", help="Time for which both keys are valid.")] = "24h",
    expires: Annotated[
        str,
        typer.Option("--expires", help="Time from now until the new key expires; default: the old one's lifetime."),
    ] = "",
    file: FileOption = Path("keys.json"),
    as_json: JsonOption = False,
) -> None:
    """Replace a key: the new one has the same rights. The old one expires after the overlap."""
    from qinfer.core.api_keys import rotate_key

    entry, key = rotate_key(file, key_id, _duration(overlap), _duration(expires) if expires else None)
    note = f"Key '{entry.id}' of tenant '{entry.tenant}' was added to {file}; '{key_id}' expires in {overlap}."
    _show_once(entry, key, note, as_json=as_json)


def _row(key: "ApiKey") -> dict[str, str]:
    """Returns the public part of an entry; `created` and `expires` are RFC 3339, or empty."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": ",".join(key.scopes),
        "created": key.created_at.astimezone(UTC).isoformat() if key.created_at else "",
        "expires": key.expires_at.astimezone(UTC).isoformat() if key.expires_at else "",
        "state": "expired" if key.is_expired(datetime.now(UTC)) else "valid",
    }


def _table(rows: "list[dict[str, str]]") -> "RenderableType":
    # Two complete instants do not fit into 80 columns.
    short = [row | {name: row[name][:16].replace("T", " ") for name in ("created", "expires")} for row in rows]
    cells = [[value or "-" for value in row.values()] for row in short]
    return table("API keys (times in UTC)", "id!, tenant, scopes, created, expires, state", cells)


def _show_once(entry: "ApiKey", key: str, note: str, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    if as_json:
        expires = {"expires_at": entry.expires_at} if entry.expires_at else {}
        print_json({"id": entry.id, "tenant": entry.tenant, "scopes": list(entry.scopes), **expires, "key": key})
        return
    Console(stderr=True, soft_wrap=True).print(Text(f"{note} This is the only time it is shown:"))
    print(key)

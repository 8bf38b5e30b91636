"""`qinfer workers`: who works, on what, and how well."""

from pathlib import Path

from qinfer.cli.console import JsonOption, print_json
from qinfer.cli.status import DataDirOption, RedisOption

EXAMPLE = "Example: qinfer workers --json"


def workers(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    as_json: JsonOption = False,
) -> None:
    """Show the live workers and bulk workers.

    State is ready, loading, draining, or trouble if a model could not be loaded. Clock is Redis' time minus the
    worker's.
    """
    import msgspec
    from rich.console import Console

    from qinfer.cli.overview import redis_settings, run_overview
    from qinfer.cli.tables import workers_tables

    overview = run_overview(redis_settings(redis, data_dir))
    if as_json:
        print_json(msgspec.to_builtins({"workers": overview.workers, "bulk_workers": overview.bulk_workers}))
    else:
        Console().print(workers_tables(overview.workers, overview.bulk_workers))

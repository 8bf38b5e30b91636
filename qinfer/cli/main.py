"""The command line: `qinfer up | infer | submit | jobs | label | bridge | status | queues | workers | models | …`.

This module and the command modules hold options and help texts only, and import what a command needs when it runs:
`qinfer --help` answers in the time that Python takes to start.
"""

from typing import Annotated

import typer

from qinfer import __version__
from qinfer.cli import bench, bridge, dlq, doctor, healthcheck, infer, keys, models, queues, status, workers
from qinfer.cli.console import ErrorsAsText
from qinfer.cli.jobs import jobs, label, submit
from qinfer.cli.local import up
from qinfer.cli.scaling import autoscale

app = typer.Typer(
    name="qinfer",
    help="A durable, queue-backed inference server that speaks NVIDIA Triton's protocol.",
    epilog="Start with: qinfer up --model-repository ./models",
    cls=ErrorsAsText,
    no_args_is_help=True,
    rich_markup_mode=None,  # boxes cut the names of options on a terminal of 80 columns
    pretty_exceptions_show_locals=False,  # locals may hold a password
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up", epilog=up.EXAMPLE, short_help="Run everything on this machine.")(up.up)
app.command("autoscale", epilog=autoscale.EXAMPLE, short_help="Run as many workers as the work asks for.")(
    autoscale.autoscale
)
app.command("infer", epilog=infer.EXAMPLE)(infer.infer)
app.command("submit", epilog=submit.EXAMPLE, short_help="Have a model score files: a bulk job.")(submit.submit)
app.add_typer(jobs.app, name="jobs", short_help="Bulk jobs: list, look, wait, cancel, resume.")
app.command("label", epilog=label.EXAMPLE, short_help="Write pre-annotations of a bulk job's output.")(label.label)
app.command("bridge", epilog=bridge.EXAMPLE, short_help="Move messages of a queue to a model and back.")(bridge.bridge)
app.command("status", epilog=status.EXAMPLE, short_help="Show models, lanes and workers.")(status.status)
app.command("queues", epilog=queues.EXAMPLE, short_help="Show what the lanes hold, and how much work it is.")(
    queues.queues
)
app.command("workers", epilog=workers.EXAMPLE)(workers.workers)
app.command("doctor", epilog=doctor.EXAMPLE, short_help="Find what is wrong here, and say what to do.")(doctor.doctor)
app.add_typer(models.app, name="models", short_help="Synchronize, list, load and unload models.")
app.add_typer(keys.app, name="keys")
app.add_typer(dlq.app, name="dlq", short_help="Requests that were given up (dead letters).")
app.add_typer(healthcheck.app, name="healthcheck", short_help="Is this machine's program well? For containers.")
app.command("bench", epilog=bench.EXAMPLE, short_help="Load a model for a while, and measure it.")(bench.bench)


def _print_version(wanted: bool) -> None:  # noqa: FBT001  (typer's callback)
    if wanted:
        print(f"qinfer {__version__}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A durable, queue-backed inference server that speaks NVIDIA Triton's protocol."""


if __name__ == "__main__":
    app()

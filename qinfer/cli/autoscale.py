"""`qinfer autoscale`: as many workers on this machine as the work asks for."""

from pathlib import Path
from typing import Annotated

import typer

from qinfer.cli.console import JsonOption
from qinfer.cli.status import DataDirOption, RedisOption

EXAMPLE = "Example: qinfer autoscale --min 0 --max 4 --redis redis://queue:6379/0"

MinOption = Annotated[
    int, typer.Option("--min", envvar="QINFER_AUTOSCALE__MIN_WORKERS", min=0, help="The fewest workers.")
]
MaxOption = Annotated[
    int,
    typer.Option(
        "--max", envvar="QINFER_AUTOSCALE__MAX_WORKERS", min=0, help="The most workers; 0 = one for each core."
    ),
]
TargetOption = Annotated[
    float,
    typer.Option(envvar="QINFER_AUTOSCALE__TARGET_S", help="Seconds of work that one worker may have."),
]
UpAfterOption = Annotated[
    float,
    typer.Option(
        envvar="QINFER_AUTOSCALE__UP_AFTER_S",
        min=0,
        help="Seconds that more must be wanted; the first starts at once.",
    ),
]
DownAfterOption = Annotated[
    float, typer.Option(envvar="QINFER_AUTOSCALE__DOWN_AFTER_S", min=0, help="Seconds that fewer must suffice.")
]
IdleOption = Annotated[
    float,
    typer.Option(
        envvar="QINFER_AUTOSCALE__IDLE_S", min=0, help="Seconds of nothing to do, after which the fewest are left."
    ),
]
CooldownOption = Annotated[
    float,
    typer.Option(
        envvar="QINFER_AUTOSCALE__COOLDOWN_S",
        min=0,
        help="Seconds after a step up without a step down; 1.5 times the load time, if that is more.",
    ),
]
RecordOption = Annotated[
    str,
    typer.Option(
        envvar="QINFER_AUTOSCALE__RECORD",
        metavar="FILE",
        help="Add a line of JSON with what is seen and decided each second to this file.",
    ),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Start nothing: tell what these options would have made of the traffic of a --record.",
    ),
]
LateOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="With --replay: seconds above which a wait is late; default: --target-s and the start of a worker.",
    ),
]


def autoscale(
    *,
    least: MinOption = 0,
    most: MaxOption = 0,
    target_s: TargetOption = 10.0,
    up_after_s: UpAfterOption = 0.0,
    down_after_s: DownAfterOption = 60.0,
    idle_s: IdleOption = 300.0,
    cooldown_s: CooldownOption = 30.0,
    record: RecordOption = "",
    replay: ReplayOption = None,
    late_s: LateOption = None,
    as_json: JsonOption = False,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
) -> None:
    """Run as many workers on this machine as the work asks for, beside a gateway and a Redis that are there.

    It looks at the queue each second. What waits and executes, in seconds of one worker's work, divided by --target-s,
    is how many workers there should be. Without a worker a model accepts requests if QINFER_REPOSITORY__MIN_WORKERS is
    0 for the gateways, or qinfer.min_workers of its configuration; for others one worker is kept.

    The workers take this command's environment. One that crashed is started again. SIGTERM ends it: all workers drain.

    While Redis is away what runs is kept.

    With --replay nothing is started and no Redis is asked: a simulation of the same policy tells the seconds of workers
    and the late rows that the options would have meant, beside what really was. --late-s and --json belong to it.

    Exit codes: 0 stopped, or replayed; 2 a setting or a record is wrong.
    """
    from qinfer.cli.autoscaling import run_autoscaler
    from qinfer.cli.overview import redis_settings
    from qinfer.cli.scaling_replay import run_replay

    options = {
        "min_workers": least,
        "max_workers": most,
        "target_s": target_s,
        "up_after_s": up_after_s,
        "down_after_s": down_after_s,
        "idle_s": idle_s,
        "cooldown_s": cooldown_s,
    }
    if replay is not None:
        run_replay(replay, options, late_s, as_json=as_json)
        return
    if as_json or late_s is not None:
        raise typer.BadParameter("it belongs to --replay", param_hint="--json" if as_json else "--late-s")
    run_autoscaler(redis_settings(redis, data_dir), {**options, "record": record})

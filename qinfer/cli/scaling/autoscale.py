"""`qinfer autoscale`: as many workers on this machine as the waiting work needs."""

from functools import partial
from pathlib import Path

from qinfer.cli.console import DataDirOption, Options, RedisOption, option, with_options

EXAMPLE = "Example: qinfer autoscale --min 0 --max 4 --redis redis://queue:6379/0"


_number, _seconds = partial(option, int, 0, min=0), partial(option, float, min=0)

SCALING_OPTIONS: Options = {
    "min_workers": _number("Minimum number of workers.", "--min", envvar="QINFER_AUTOSCALE__MIN_WORKERS"),
    "max_workers": _number(
        "Maximum number of workers; 0 = one per core.", "--max", envvar="QINFER_AUTOSCALE__MAX_WORKERS"
    ),
    "target_s": option(float, 10.0, "Seconds of waiting work per worker.", envvar="QINFER_AUTOSCALE__TARGET_S"),
    "up_after_s": _seconds(
        0.0,
        "Seconds of sustained demand before scaling up; the first worker starts at once.",
        envvar="QINFER_AUTOSCALE__UP_AFTER_S",
    ),
    "down_after_s": _seconds(
        60.0, "Seconds of sustained lower demand before scaling down.", envvar="QINFER_AUTOSCALE__DOWN_AFTER_S"
    ),
    "idle_s": _seconds(300.0, "Idle seconds before scaling down to --min.", envvar="QINFER_AUTOSCALE__IDLE_S"),
    "cooldown_s": _seconds(
        30.0,
        "Seconds without scaling down after scaling up; at least 1.5 times the models' load time.",
        envvar="QINFER_AUTOSCALE__COOLDOWN_S",
    ),
}
"""The settings of the autoscaler that are options, too."""


@with_options(SCALING_OPTIONS)
def autoscale(
    *,
    redis: RedisOption = "",
    data_dir: DataDirOption = Path(".qinfer"),
    **given: float,
) -> None:
    """Run as many workers on this machine as the waiting work needs, beside an existing gateway and Redis.

    The autoscaler reads the queue each second. The wanted number of workers is the waiting and executing work, in
    seconds of one worker, divided by --target-s. A model accepts requests without a worker if the gateways run with
    QINFER_REPOSITORY__MIN_WORKERS=0 or its configuration sets qinfer.min_workers to 0; otherwise one worker is kept.

    Workers inherit this command's environment. A crashed worker is restarted. SIGTERM drains all workers and exits.

    While Redis is unreachable the number of workers does not change.

    Exit codes: 0 stopped; 64 an option or a setting is wrong.
    """
    from qinfer.cli.overview import program_variables, redis_settings
    from qinfer.cli.scaling.scaler import run_autoscaler

    run_autoscaler(redis_settings(redis, data_dir), given, program_variables(redis, data_dir))

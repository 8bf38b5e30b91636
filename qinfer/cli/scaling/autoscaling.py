"""What `qinfer autoscale` does with its options: a supervisor with an autoscaler, until a signal asks to stop."""

import logging
import os
from collections.abc import Mapping

from qinfer.cli.local.machine import child_environment
from qinfer.cli.local.supervisor import Supervisor
from qinfer.cli.local.worker_pool import autoscaler
from qinfer.core.settings import RedisSettings, load_settings
from qinfer.observe import logs

logger = logging.getLogger("qinfer.autoscale")


def run_autoscaler(redis: RedisSettings, options: Mapping[str, float | str]) -> None:
    """Runs until a signal asks to stop, then drains all workers.

    Args:
        redis: Where the queue is.
        options: Fields of `AutoscaleSettings` in place of the environment's.

    Raises:
        SettingsError: The limits make no sense together, a variable is wrong, or the record can't be written.
    """
    settings = load_settings()
    scaling = settings.autoscale.model_copy(update=dict(options))
    settings = settings.model_copy(update={"autoscale": scaling, "redis": redis})
    env = child_environment(os.environ, {"QINFER_REDIS__URL": redis.url.get_secret_value()})
    with Supervisor(lambda line: logger.warning("workers", extra={"what": line})) as supervisor:
        crew = autoscaler(settings, supervisor, env)
        logs.configure(settings.log, "autoscale")
        logger.info("autoscale started", extra={"limits": crew.about, "models": list(settings.worker.models)})
        try:
            crew.start()
            while not supervisor.stop_asked:
                supervisor.wait()
                crew.step()
            logger.info("stopping", extra={"workers": len(crew.processes)})
        finally:
            crew.close()
            supervisor.stop(crew.processes)
        logger.info("autoscale stopped")

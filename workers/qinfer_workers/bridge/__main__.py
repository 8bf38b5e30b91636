"""The bridge's composition root: `python -m qinfer_workers.bridge CONFIG [--check]`.

At the start it waits for Redis. After SIGTERM or SIGINT it finishes the messages in hand. Exit codes: 0 after a stop, 1
when a check fails, 2 for a wrong setting, 70 when a part of it died.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
from pathlib import Path

import uvloop

from qinfer.core.processes import protect_process
from qinfer.core.settings import Settings, load_settings
from qinfer.errors import BrokerUnavailable, SettingsError
from qinfer.observe import logs
from qinfer_workers.bridge.config import BridgeConfig, load_config
from qinfer_workers.bridge.program import check, open_links, serve
from qinfer_workers.liveness import exit_process, open_health

logger = logging.getLogger("qinfer_workers.bridge")

GC_THRESHOLD = 50_000


async def _run_bridge(config: BridgeConfig, settings: Settings) -> int:
    stop = asyncio.Event()
    loop, starting = asyncio.get_running_loop(), asyncio.current_task()
    assert starting is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, starting.cancel)  # the start may wait for Redis
    touching = None if (health := open_health(settings)) is None else loop.create_task(health.run())
    async with open_links(settings) as links:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD, 20, 50)
        await serve(config, settings, links, stop)
    if touching is not None:
        touching.cancel()
    return os.EX_OK


async def _check_config(config: BridgeConfig, settings: Settings) -> int:
    return os.EX_OK if await check(config, settings, print) else 1


def main() -> int:
    """Runs the program and returns the exit status."""
    protect_process(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for gateways
    parser = argparse.ArgumentParser(prog="python -m qinfer_workers.bridge")
    parser.add_argument("config", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        settings = load_settings()
        config = load_config(options.config, os.environ)
        is_quiet = options.check and settings.log.level == "INFO"
        log = settings.log.model_copy(update={"level": "WARNING"}) if is_quiet else settings.log
        logs.configure(log, "bridge", unknown=settings.unknown)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run((_check_config if options.check else _run_bridge)(config, settings))
    except SettingsError as error:
        logs.cannot_start(os.environ, "qinfer bridge", error.message)
        return 2
    except asyncio.CancelledError:
        return os.EX_OK
    except BrokerUnavailable as error:
        logs.cannot_start(os.environ, "qinfer bridge", error.message)
        return 1
    except Exception:  # such threads would keep the process alive
        logger.exception("bridge failed")
        return os.EX_SOFTWARE


if __name__ == "__main__":
    exit_process(main())

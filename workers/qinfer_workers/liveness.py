"""Ends a program whose threads may wait for an unreachable broker or store."""

import logging
import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """Ends the process without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

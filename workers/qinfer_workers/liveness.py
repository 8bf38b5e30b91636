"""How a program ends whose threads may wait for a broker or a store that is away."""

import logging
import os
import sys
from typing import NoReturn


def end(code: int) -> NoReturn:
    """Ends the process; threads that wait for a broker or a store that is away are not waited for."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Triton's module, for processes that import `model.py` again, as `multiprocessing`'s."""

from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

"""Triton's module for processes that a model starts and that import `model.py` again, as `multiprocessing` does."""

from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

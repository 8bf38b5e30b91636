"""Triton's module for processes that a model starts, which import `model.py` anew, as `multiprocessing` does."""

from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

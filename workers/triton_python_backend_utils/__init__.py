"""Triton's module for `model.py`, for tests and type checkers; the host process of a model brings its own."""

from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

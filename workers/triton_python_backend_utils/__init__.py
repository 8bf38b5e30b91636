"""Triton's module for `model.py`, for tests and type checkers; the host process of a model brings its own.

In a process of Triton's own Python backend, whose module this one would hide, it becomes that.
"""

import sys

if "c_python_backend_utils" in sys.builtin_module_names:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
    from pathlib import Path

    here = Path(__file__).parents[1]
    spec = PathFinder.find_spec(__name__, [place for place in sys.path if Path(place).resolve() != here])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
else:
    from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

"""Starts the host process in an environment without qinfer: run as a file, by the environment's own Python.

`python -P start.py <LD_LIBRARY_PATH> <first> <last> <arguments of qinfer.backends.python_host>`

Args:
    LD_LIBRARY_PATH: The value for programs that the model starts; empty = unset.
    first: A directory with qinfer only, before the environment's packages.
    last: A directory with msgspec only, after them; empty = the environment has its own.
"""

import os
import runpy
import sys

if __name__ == "__main__":
    libraries, first, last, *arguments = sys.argv[1:]
    os.environ.pop("LD_LIBRARY_PATH", None)
    if libraries:
        os.environ["LD_LIBRARY_PATH"] = libraries
    sys.path.insert(0, first)
    if last:
        sys.path.append(last)
    sys.argv[1:] = arguments
    runpy.run_module("qinfer.backends.python_host", run_name="__main__", alter_sys=True)

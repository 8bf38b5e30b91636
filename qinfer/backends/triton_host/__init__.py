"""Triton's own core in a host process, so that unmodified C backends (`libtriton_<name>.so`) load.

    worker process                                            host process, one for each model instance
    triton.TritonBackend ── python.PythonBackend ── python_host ──▶ host.ModelHost ── model.TritonPythonModel
             │                                                                           │ core.Core (ctypes)
             └─ library: files, links, configuration                                     ▼
                                                            libtritonserver.so ── libtriton_<name>.so

The process is the one of a `model.py`, with `model.TritonPythonModel` in its place: batches, responses, limits and
restarts are those of backend `python`.
"""

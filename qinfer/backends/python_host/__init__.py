"""The process of a `model.py`, and the code that it shares with its worker.

    worker process                                   host process, one for each model instance
    python.PythonBackend ── process.HostInstance ──┐
                            process.HostProcess ◀── channel.Channel ──▶ __main__ ── host.ModelHost ── model.py
                                                       messages            utils = triton_python_backend_utils

With an environment of the model: process.HostProcess ──▶ packed ──▶ start.py ──▶ __main__

`model.py` imports `utils` as `triton_python_backend_utils`.
"""

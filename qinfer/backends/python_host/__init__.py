"""The process of a `model.py`, and the code that it shares with the worker that starts it.

    worker process                                    host process, one for each model instance
    python.PythonBackend ── instance.Instance ──┐
                              process.HostProcess ◀── channel.Channel ──▶ __main__ ── host.Host ── model.py
                                                        messages            utils = triton_python_backend_utils

`channel` moves messages and tensors, `messages` says which there are. In the worker, `calls` runs other models for a
model, and `streams` hears a decoupled one. What `model.py` imports as `triton_python_backend_utils` is `utils`, made of
`tensor`, `inference`, `responses` and `services`.
"""

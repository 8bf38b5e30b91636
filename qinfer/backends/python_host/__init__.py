"""The process of a `model.py`, and the code that it shares with its worker.

    worker process                                    host process, one for each model instance
    python.PythonBackend ── instance.Instance ──┐
                              process.HostProcess ◀── channel.Channel ──▶ __main__ ── host.Host ── model.py
                                                        messages            utils = triton_python_backend_utils

`channel` transports the `messages` and tensors. In the worker, `calls` runs other models for a model, and `streams`
reads a decoupled one's responses. `model.py` imports `utils` as `triton_python_backend_utils`, made of `tensor`,
`inference`, `responses` and `services`.
"""

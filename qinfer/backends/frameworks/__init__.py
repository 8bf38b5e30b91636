"""Frameworks that run in the process of each instance, which no program of qinfer imports.

    worker process                             host process of `python_host`
    isolated.FrameworkBackend ── HostProcess ──▶ host.ModelHost ── base.LoadedFramework ── tensorflow, litert, …

An adapter is a module with the framework's name and a function `load(asked) -> Framework`.
"""

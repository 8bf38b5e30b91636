"""A model's own environment (`EXECUTION_ENV_PATH`): unpacked, activated, and entered by the model's process.

    process.HostProcess ──▶ packed.__main__, in the worker's Python ─▶ start.py, in the environment's ──▶ host.ModelHost
                              environments: unpacks once by hash, locks, removes unused ones
                              archive: the contents and the size that an archive may have

The process replaces itself by the environment's Python (`exec`). The worker receives `EnvironmentReady` or
`HostFailure`.
"""

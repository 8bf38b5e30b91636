"""A model's own environment (`EXECUTION_ENV_PATH`): unpacked, activated, and entered by the model's process.

    process.HostProcess ──▶ packed.__main__, in the worker's Python ──▶ start.py, in the environment's ──▶ host.Host
                              environments: unpacks once by hash, holds, removes what is unused
                              archive: what an archive may hold, and how much

All of it runs in the model's process, which replaces itself by the environment's Python (`exec`). The worker only says
which archive, and hears `EnvironmentReady` or `Failed`.
"""

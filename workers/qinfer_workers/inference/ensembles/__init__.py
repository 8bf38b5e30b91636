"""Ensembles in a worker: plans (`plans`), and requests on their way through the steps (`runs`, `run`).

Begin with `run`.
"""

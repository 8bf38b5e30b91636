"""Ensembles in a worker: plans (`plans`), and requests on their way through the steps (`batcher`, `run`).

Begin with `run`.
"""

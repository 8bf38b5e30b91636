"""Schedulers of sequences decide which requests run together, and when; pure (reference §3.4).

Begin with `scheduler`; `batcher` runs its decisions.
"""

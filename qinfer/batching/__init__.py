"""Batching: a pure policy decides which requests run together, and the batcher runs them.

Begin with `policy`, then `batcher`.
"""

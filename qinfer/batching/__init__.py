"""Batching: a pure policy says which requests run together and when, and the batcher runs them."""

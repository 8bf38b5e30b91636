"""Metrics, statistics and traces of a gateway."""

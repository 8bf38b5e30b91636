"""Metrics, statistics and traces of a gateway. Begin with `reporting`, which serves `/metrics`."""

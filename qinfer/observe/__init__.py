"""Observability: statistics, metrics, traces and logs. Begin with `catalogue`, which names every metric."""

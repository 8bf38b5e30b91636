"""Observability: statistics, metrics, traces and logs."""

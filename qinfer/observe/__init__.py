"""Metric names, statistics and logs."""

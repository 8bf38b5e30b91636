"""Autoscaling: how many workers the waiting work needs, and the records of past decisions. Begin with `policy`."""

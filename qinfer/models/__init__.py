"""Desired state, placement and readiness: what should be loaded, what is, and what the gateway may admit."""

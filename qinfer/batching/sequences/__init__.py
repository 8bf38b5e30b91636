"""Schedulers of sequences decide which requests run together, and when; pure (reference §3.4)."""

"""Bytes ↔ messages, pure: frames for Redis, KServe JSON with the binary tensor extension for HTTP."""

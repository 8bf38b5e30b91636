"""Bytes ↔ messages, pure: frames for Redis, KServe JSON with the binary tensor extension for HTTP.

Begin with `frame` and `kserve_json`.
"""

"""Bulk jobs: specifications, planning of shards, reading of rows, writing of parts, and consistent outputs.

Begin with `job`, the specification, and `plan`, its shards.
"""

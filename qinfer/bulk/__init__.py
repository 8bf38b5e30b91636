"""Bulk jobs: what a job is, how it is cut into shards, and how its parts become an output that is whole or not there."""

"""Bulk jobs: what a job is, how it is cut into shards, how rows are read, parts written and stores left consistent."""

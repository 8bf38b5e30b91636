"""Bulk jobs: `/v1/jobs`, and the checks before a job is accepted. Begin with `service`."""

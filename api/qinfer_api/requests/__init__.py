"""Asynchronous requests: `/v1/…/requests`, webhooks, event streams, the janitor."""

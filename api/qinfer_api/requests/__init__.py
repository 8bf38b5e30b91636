"""Asynchronous requests: routes, webhooks, event streams, the janitor. Begin with `service`."""

"""Endpoints at the gateway, declared by the API and by files. Begin with `service`."""

"""Shared basics: clock, messages, settings, documents, retry, child processes, API keys."""

"""Shared basics: clock, messages, settings, documents, retry, child processes, API keys.

Begin with `messages`, which every layer passes on.
"""

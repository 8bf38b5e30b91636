"""The vocabulary every part shares: clock, messages, settings, documents, retry, child processes, API keys."""

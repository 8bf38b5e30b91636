"""The inference worker."""

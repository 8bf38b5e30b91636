"""What executes a batch: one small protocol (`base`), and an adapter for each runtime."""

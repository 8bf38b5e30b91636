"""The inference worker: fetches, batches, executes, publishes."""

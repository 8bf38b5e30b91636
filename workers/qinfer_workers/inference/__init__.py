"""The inference worker: fetches entries, forms batches, executes them, and publishes the answers.

Begin with `worker`, then `intake`, `executor` and `publisher`.
"""

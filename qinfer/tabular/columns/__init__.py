"""Arrow columns to tensors, and their types. Begin with `inputs`."""

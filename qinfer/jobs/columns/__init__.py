"""Arrow columns to tensors, and tensors to columns of the output. Begin with `inputs` and `outputs`."""

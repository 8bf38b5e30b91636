"""Columns of Arrow batches to tensors, and tensors to columns of the output."""

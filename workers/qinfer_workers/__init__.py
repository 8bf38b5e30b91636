"""PROGRAM 2, the workers."""

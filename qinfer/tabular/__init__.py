"""Rows of files and messages: reading them in bounded memory, and columns as tensors; for bulk jobs and the bridge.

Begin with `source`, which finds and opens files, and `inputs`, which makes a model's inputs.
"""

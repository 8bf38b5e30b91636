"""Rows of files and messages: reading them in bounded memory, and columns as tensors; for bulk jobs and the bridge.

Begin with `rows/source`, which finds and opens files, and `columns/inputs`, which makes a model's inputs.
"""

"""Scores shards of bulk jobs on a worker's models, between online batches."""

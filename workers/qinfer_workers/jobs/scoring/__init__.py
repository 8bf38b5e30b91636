"""The worker's side of bulk jobs: shards are scored on the models that it serves, between their online batches."""

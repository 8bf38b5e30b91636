"""The worker's side of bulk jobs: scores shards on the models that it serves, between their online batches.

Begin with `shard_loop`, then `scoring`.
"""

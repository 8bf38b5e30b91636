"""Bulk jobs in the queue: records, shards and outcomes in Redis. Begin with `jobs`."""

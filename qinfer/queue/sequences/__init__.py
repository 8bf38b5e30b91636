"""Sequences of requests in the queue: one owner each, committed steps, answers to steps that no worker executes.

Begin with `ownership`, whose head lists the guarantees.
"""

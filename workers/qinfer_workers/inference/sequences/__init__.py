"""Sequences in a worker: it owns sequences of stateful models, and executes their steps in order.

Begin with `service`; `publisher` commits and publishes the answers.
"""

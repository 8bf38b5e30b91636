"""Models: configuration, repositories, desired state, placement and readiness.

Begin with `spec`, the model as workers see it, and `catalog`, the models as gateways see them.
"""

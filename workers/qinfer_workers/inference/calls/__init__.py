"""Calls of models by models: a worker submits them as a gateway submits requests.

Begin with `caller`.
"""

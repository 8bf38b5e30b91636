"""Autoscaling: the waiting work, how many workers it needs, and the records of past decisions.

Begin with `work`, the measure, and `policy`, the decision.
"""

"""Autoscaling: the waiting work, and how many workers it needs.

Begin with `work`, the measure, and `policy`, the decision.
"""

"""Traffic: the choice of an endpoint's target, and the judgement of canaries.

Begin with `routing` and `choice`; `canary` judges.
"""

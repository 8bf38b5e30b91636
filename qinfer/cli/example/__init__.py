"""`qinfer example`: files to begin with.

`scripts/generate_example.py` makes those of `digits`; rules and dashboards of `monitoring` are links into `deploy/`.
"""

"""`qinfer example`: example files.

`scripts/generate_example.py` makes those of `digits`; rules and dashboards of `monitoring` are links into `deploy/`.
"""

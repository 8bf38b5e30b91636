"""`qinfer example`: a model to begin with; its files are made by `scripts/generate_example.py`."""

"""Models in Python, and a backend of one's own, for the measurements of sequences and streams."""

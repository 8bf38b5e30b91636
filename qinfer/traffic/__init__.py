"""Traffic between versions of a model: the evidence against a canary, its steps, and how outputs differ."""

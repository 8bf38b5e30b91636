"""Traffic: the choice of an endpoint's target, and the judgement of canaries."""

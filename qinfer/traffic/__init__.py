"""Traffic: the choice of the target that answers a request to an endpoint, and the judgement of canaries."""

"""Traffic: which target answers a request to an endpoint, and whether a canary is as good as the stable one."""

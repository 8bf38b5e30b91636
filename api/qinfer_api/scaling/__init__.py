"""The backlog of a model, for autoscalers. `routes` is all of it."""

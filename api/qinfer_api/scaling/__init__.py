"""The backlog of a model, for autoscalers."""

"""Models: configuration, repositories, desired state, placement and readiness."""

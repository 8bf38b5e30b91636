"""The bridge: messages of another queue to a model, and predictions back. Begin with `route`."""

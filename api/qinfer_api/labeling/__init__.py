"""Label Studio's ML-backend calls, and pushed predictions (docs/how-to/label-studio.md). Begin with `service`."""

"""Label Studio: its ML-backend calls, and the predictions that are pushed to it (docs/how-to/label-studio.md)."""

"""PROGRAM 1, the gateway: HTTP in, the queue behind, answers back."""

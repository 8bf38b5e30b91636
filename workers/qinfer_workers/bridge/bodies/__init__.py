"""Message bodies to inference requests, by content type."""

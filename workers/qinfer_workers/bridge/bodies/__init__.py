"""Message bodies to inference requests, by content type. Begin with `decode`."""

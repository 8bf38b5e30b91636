"""The asynchronous client, from which `scripts.generate_client` makes the blocking one."""

"""The blocking client, which `scripts.generate_client` makes from the asynchronous one."""

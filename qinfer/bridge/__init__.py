"""Reports and metrics of bridges, for gateways. `reports` has the records; the bridge itself is in the workers."""

"""Reports and metrics of bridges, for gateways."""

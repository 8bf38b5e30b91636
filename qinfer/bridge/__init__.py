"""Reports and metrics of bridges, as gateways show them."""

"""The checks of `qinfer doctor` and `qinfer healthcheck`: each module checks one thing. Begin with `all`."""

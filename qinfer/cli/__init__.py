"""The command line, `qinfer …`."""

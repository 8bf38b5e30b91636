"""The command line, `qinfer …`. Begin with `main`, which lists the commands; each has a module of its name."""

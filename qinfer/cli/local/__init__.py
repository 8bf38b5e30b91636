"""`qinfer up`: the processes of one machine, started, supervised, stopped. Begin with `supervisor`."""

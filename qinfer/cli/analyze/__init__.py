"""`qinfer analyze`: finds the best configuration of a model by measurements.

space      which configurations there are, and how one becomes a `config.pbtxt`; pure
figures    what a measurement found, and what the objective says about it; pure
search     which point of a model is measured next, until there is a winner; pure
mix        which model of several is tuned next, until the others can't gain; pure
loads      models with their shares of the requests, and how each is asked
accuracy   how far answers agree with those of the present configuration
session    a run, from the load to the reports
journal    the measurements on disk: a command that was killed goes on with them
measure    load on a gateway, in windows, until the interval is narrow
stack      a private server on which configurations are tried
live       a live installation on which they are tried beside the model that callers use
guard      when callers would notice; pure but for its probes
apply      the winner as a canary
report     tables of the terminal, and a page of HTML
"""

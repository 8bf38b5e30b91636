"""`qinfer analyze`: finds the best configuration of a model by measurements.

space      which configurations there are, and how one becomes a `config.pbtxt`; pure
figures    what a measurement found, and what the objective says about it; pure
search     which point is measured next, until there is a winner; pure
journal    the measurements on disk: a command that was killed goes on with them
measure    load on a gateway, in windows, until the interval is narrow
stack      a private server on which configurations are tried
report     tables of the terminal, and a page of HTML
"""

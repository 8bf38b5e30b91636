"""`qinfer submit`, `qinfer jobs`, `qinfer label`: bulk jobs and their output. Begin with `jobs`."""

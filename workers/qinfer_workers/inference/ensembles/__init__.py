"""Ensembles in a worker: what they run is planned (`plans`), and requests go from step to step (`batcher`, `run`)."""

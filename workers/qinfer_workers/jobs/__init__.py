"""The bulk worker: plans, finishes and sweeps jobs, as tasks of Celery. Begin with `__main__`."""

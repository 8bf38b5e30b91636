"""The bulk worker: plans jobs, finishes them, and looks after those that are stuck; as tasks of Celery."""

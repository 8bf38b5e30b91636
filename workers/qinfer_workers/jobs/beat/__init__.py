"""Celery's beat in a process of its own, for bulk workers that have `bulk.beat` off."""

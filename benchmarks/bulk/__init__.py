"""Bulk scoring, measured beside a hand-written loop and Ray Data."""

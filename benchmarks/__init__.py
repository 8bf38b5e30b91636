"""Measures qinfer against peers on one machine, in one run (see README.md)."""

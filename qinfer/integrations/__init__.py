"""Plugins of other programs that call qinfer; each stands on `qinfer.client` and on the program's own package."""

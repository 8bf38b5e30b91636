"""A directory for `sys.path`: what processes that a model spawns can import, too."""

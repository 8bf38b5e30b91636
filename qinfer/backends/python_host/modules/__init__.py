"""A directory for `sys.path`, whose modules processes that a model spawns can import too."""

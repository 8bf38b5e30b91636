"""A directory for `sys.path`, with modules for processes that a model spawns."""

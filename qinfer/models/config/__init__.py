"""`config.pbtxt`: read, completed from model files, checked, turned into a `ModelSpec`."""

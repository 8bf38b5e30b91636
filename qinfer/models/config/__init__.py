"""`config.pbtxt`: parsed, completed from model files, checked, turned into a `ModelSpec`. Begin with `config`."""

# What a `model.py` imports by this name; the module itself exists in the process of a model only.
from qinfer.backends.python_host.utils import *  # noqa: F403  all that there is

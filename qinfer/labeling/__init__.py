"""Labeling: tasks → a model's inputs, its outputs → predictions of labeling tools, by a declared mapping.

The package is pure: callers fetch the files that `Mapping.files` names.
"""

from qinfer.labeling.exports import FORMATS, Format, Task
from qinfer.labeling.mapping import Mapping, load_mapping, model_version

__all__ = ["FORMATS", "Format", "Mapping", "Task", "load_mapping", "model_version"]

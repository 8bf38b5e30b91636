"""Labeling: tasks → a model's inputs, its outputs → predictions of labeling tools, by a declared mapping. Pure.

`mapping` says what is declared, and is the way in; `inputs` and `results` do the work, `label_config` reads what
Label Studio shows its users, `exports` writes files. Nothing here fetches anything: who has tasks with files fetches
what `Mapping.files` names.
"""

from qinfer.labeling.exports import FORMATS, Format, Task
from qinfer.labeling.mapping import Mapping, load_mapping, model_version

__all__ = ["FORMATS", "Format", "Mapping", "Task", "load_mapping", "model_version"]

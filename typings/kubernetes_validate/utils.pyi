from collections.abc import Callable
from typing import Any

schema_contents: Callable[[str, str], Any]

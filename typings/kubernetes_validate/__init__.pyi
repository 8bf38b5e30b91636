from collections.abc import Mapping
from typing import Any

class ValidationError(Exception):
    message: str

class SchemaNotFoundError(Exception): ...

def validate(data: Mapping[str, Any], desired_version: str, strict: bool = False) -> str: ...

from typing import Any

class Message:
    body: bytes | str
    properties: dict[str, Any]
    def __init__(self, body: bytes = ..., **properties: Any) -> None: ...

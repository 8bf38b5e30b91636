should_stop: int | bool | None

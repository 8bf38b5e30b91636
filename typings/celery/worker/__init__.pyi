class WorkController:
    exitcode: int | None
    def __init__(
        self,
        *,
        hostname: str = ...,
        pool_cls: str = ...,
        concurrency: int = ...,
        queues: str = ...,
        without_mingle: bool = ...,
        without_gossip: bool = ...,
    ) -> None: ...
    def start(self) -> None: ...

class AirflowConfigParser:
    def getboolean(self, section: str, key: str, *, fallback: bool = ...) -> bool: ...

conf: AirflowConfigParser

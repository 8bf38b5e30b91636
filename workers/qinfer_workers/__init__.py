"""The programs beside the gateway: inference workers, bulk workers, the bridge.

Begin with `inference.worker`; each program is started by its package's `__main__`.
"""

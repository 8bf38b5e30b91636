"""Memory that gateways share with workers of their machine, for tensors that need not travel through Redis (ADR 0041).

gateway   slabs (which bytes are free) ─▶ segments (memory) ─▶ shelf (descriptors to workers)
worker    reading (descriptors of all gateways, tensors by reference)
"""

"""Memory that processes share, for tensors that need not travel through Redis (ADR 0041).

owner     slabs (which bytes are free) ─▶ segments (memory) ─▶ shelf (descriptors), listener (other machines)
reader    reading (descriptors of all owners, tensors by reference), connector (tensors of other machines)
"""

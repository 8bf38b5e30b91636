"""Memory that processes of a machine share, for tensors that need not travel through Redis (ADR 0041).

owner     slabs (which bytes are free) ─▶ segments (memory) ─▶ shelf (descriptors to readers)
reader    reading (descriptors of all owners, tensors by reference)
"""

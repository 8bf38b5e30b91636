"""Schedulers of sequences: the requests that run together, and when. Pure, like `qinfer.batching.policy`.

`scheduler.py` has the life of the sequences of one worker, `direct.py` and `oldest.py` the two strategies that make
batches of their requests, `controls.py` the inputs that tell the model about them (reference §3.4).
"""

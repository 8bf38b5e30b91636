"""One way into the queue: resolve, validate, route, stamp, place the payload, enqueue, await.

Begin with `submit`; `pending` keeps the requests that wait for answers.
"""

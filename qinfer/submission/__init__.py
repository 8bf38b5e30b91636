"""One way into the queue: resolve, validate, route, stamp, place the payload, enqueue, await."""

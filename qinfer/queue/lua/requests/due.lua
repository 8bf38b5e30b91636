-- KEYS: due. ARGV: count. Returns the ids of asynchronous requests past their deadline, the oldest first.
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[1])

-- KEYS: due. ARGV: count. Returns request ids past their deadline, oldest first.
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[1])

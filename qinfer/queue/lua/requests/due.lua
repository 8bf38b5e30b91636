-- Names asynchronous requests whose deadline has passed, the oldest first.
-- KEYS: due. ARGV: how many at most. Returns their ids.
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(), 'LIMIT', 0, ARGV[1])

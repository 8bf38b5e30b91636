-- Asks a worker to drain, and returns 1, unless it is not alive.
-- KEYS: its record. ARGV: the key that asks.
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return 0 end
redis.call('HSET', KEYS[1], 'drain', ARGV[1])
return 1

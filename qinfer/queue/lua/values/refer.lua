-- Stores a reference to an object as a hash.
-- KEYS: the value. ARGV: time to live in ms, fields and values. Returns the names of replaced objects.
local gone = {}

if redis.call('EXISTS', KEYS[1]) == 1 then drop(KEYS[1], gone) end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return gone

-- Stores a reference to an object in a store as a value. It is a hash: bytes are strings, whatever they are.
-- KEYS: the value. ARGV: its time to live in ms, fields and values.
-- Returns the names of the objects that it replaces.
local gone = {}

if redis.call('EXISTS', KEYS[1]) == 1 then drop(KEYS[1], gone) end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return gone

-- Reads a value, or its size above `most` bytes, for another connection.
-- KEYS: the value. ARGV: most. Returns the bytes, the size, {version, name, size} of an object, or nil.
if redis.call('TYPE', KEYS[1]).ok == 'hash' then return redis.call('HMGET', KEYS[1], 'v', 'name', 'size') end

local size = redis.call('STRLEN', KEYS[1])
if size > tonumber(ARGV[1]) then return size end
return redis.call('GET', KEYS[1])

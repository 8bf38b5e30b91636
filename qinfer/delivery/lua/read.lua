-- Reads a value, or says how large it is where that is more than `most` bytes: it is then read over another connection.
-- KEYS: the string. ARGV: most. Returns the value, its size, or nil.
local size = redis.call('STRLEN', KEYS[1])

if size > tonumber(ARGV[1]) then return size end
return redis.call('GET', KEYS[1])

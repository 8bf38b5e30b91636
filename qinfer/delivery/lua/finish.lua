-- Removes entries from their lane, delivered or not, whoever owns them.
-- KEYS: the lane. ARGV: group, entry ids. Returns how many there were.
local lane, group = KEYS[1], ARGV[1]

redis.call('XACK', lane, group, unpack(ARGV, 2))
return redis.call('XDEL', lane, unpack(ARGV, 2))

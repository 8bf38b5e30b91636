-- Removes entries from their lane, delivered or not, whoever owns them, with their payloads.
-- KEYS: the lane, then payloads. ARGV: group, entry ids. Returns how many entries there were.
local lane, group = KEYS[1], ARGV[1]

redis.call('XACK', lane, group, unpack(ARGV, 2))
if #KEYS > 1 then redis.call('UNLINK', unpack(KEYS, 2)) end
return redis.call('XDEL', lane, unpack(ARGV, 2))

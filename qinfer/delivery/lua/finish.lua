-- Removes entries from their lane, delivered or not, whoever owns them, with their payloads.
-- KEYS: the lane, then payloads. ARGV: group, entry ids. Returns the names of the objects that the payloads referred to.
local lane, group = KEYS[1], ARGV[1]
local gone = {}

redis.call('XACK', lane, group, unpack(ARGV, 2))
for i = 2, #KEYS do drop(KEYS[i], gone) end
redis.call('XDEL', lane, unpack(ARGV, 2))
return gone

-- Removes entries with their payloads, delivered or not.
-- KEYS: lane, payloads. ARGV: group, ids. Returns unreferenced objects, or nil.
local lane, group = KEYS[1], ARGV[1]

redis.call('XACK', lane, group, unpack(ARGV, 2))
redis.call('XDEL', lane, unpack(ARGV, 2))
ended(lane, unpack(ARGV, 2))
if #KEYS == 1 then return end

local gone = {}
for i = 2, #KEYS do drop(KEYS[i], gone) end
return gone

-- Sets the end of the leases of taken messages.
-- KEYS: leases. ARGV: ms from now, then ids.
local ends = now_ms() + tonumber(ARGV[1])
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[index]) end

-- Stores the record of a bulk job, unless it exists.
-- KEYS: record. ARGV: random word of this creation (the script may run twice), fields and values. Returns 1 if stored by it.
local record, nonce = KEYS[1], ARGV[1]

local known = redis.call('HMGET', record, 'state', 'nonce')
if known[1] then return known[2] == nonce and 1 or 0 end
redis.call('HSET', record, 'nonce', nonce, 'updated_at', now_ms(), unpack(ARGV, 2))
return 1

-- Stores the record of a bulk job, unless there is one.
-- KEYS: record. ARGV: what tells this creation from others (it may be run twice), fields and values.
-- Returns 1 where it is stored, now or by this creation's first run.
local record, nonce = KEYS[1], ARGV[1]

local known = redis.call('HMGET', record, 'state', 'nonce')
if known[1] then return known[2] == nonce and 1 or 0 end
redis.call('HSET', record, 'nonce', nonce, 'updated_at', now_ms(), unpack(ARGV, 2))
return 1

-- Appends an entry, with its payload, unless so many as `limit` wait already.
-- KEYS: the lane, its `.delayed` lane, the payload (none without).
-- ARGV: group, consumers of what was released and of suspects, limit (0 = none), frame, and with a payload: the request's
-- id, the payload's time to live in ms (0 = it is stored already), the payload.
-- Returns the entry's id, or nil where the lane is full.
local lane, delayed, payload = KEYS[1], KEYS[2], KEYS[3]
local group, released, suspects, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

if is_full(lane, delayed, limit, group, released, suspects) then return false end

if not payload then return redis.call('XADD', lane, '*', 'f', ARGV[5]) end
if ARGV[7] ~= '0' then redis.call('SET', payload, ARGV[8], 'PX', ARGV[7]) end
return redis.call('XADD', lane, '*', 'f', ARGV[5], 'p', ARGV[6])

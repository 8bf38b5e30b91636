-- Appends an entry, with its payload, unless so many as `limit` wait already.
-- KEYS: the lane, its `.delayed` lane, the payload (none without).
-- ARGV: group, limit (0 = none), frame, and with a payload: the request's id, the payload's time to live in ms (0 = it is
-- stored already), the payload.
-- Returns the entry's id, or nil where the lane is full.
local lane, delayed, payload = KEYS[1], KEYS[2], KEYS[3]
local group, limit, frame = ARGV[1], tonumber(ARGV[2]), ARGV[3]

if is_full(lane, delayed, limit, group, true) then return false end

if not payload then return redis.call('XADD', lane, '*', 'f', frame) end
if ARGV[5] ~= '0' then redis.call('SET', payload, ARGV[6], 'PX', ARGV[5]) end
return redis.call('XADD', lane, '*', 'f', frame, 'p', ARGV[4])

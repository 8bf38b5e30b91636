-- Deletes an ended job, or remains without a record.
-- KEYS: record, todo, in_lane, outcomes, log. Returns 1 = deleted, 0 = not ended, -1 = unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if state and not ENDED[state] then return 0 end
redis.call('UNLINK', unpack(KEYS, 1, 5))
return state and 1 or -1

-- Forgets a job that has ended, or whose record is gone.
-- KEYS: record, todo, in_lane, outcomes, log. Returns 1 where it was known and had ended, 0 where it has not, -1 where it was unknown.
local state = redis.call('HGET', KEYS[1], 'state')
if state and not ENDED[state] then return 0 end
redis.call('UNLINK', unpack(KEYS, 1, 5))
return state and 1 or -1

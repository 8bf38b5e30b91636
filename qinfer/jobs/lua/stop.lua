-- Stops a job that has not ended: no more of its shards come to the lane.
-- KEYS: see job.lua. ARGV: id, its new state, the reason ('' = no reason), lines of the log to keep.
-- Returns 1, or 0 if it had ended in another state or is unknown.
local id, state, reason, lines = unpack(ARGV)

local was = redis.call('HGET', KEYS[1], 'state')
if not was or was ~= state and ENDED[was] then return 0 end
redis.call('UNLINK', KEYS[2])
if was ~= state then
  become(id, state, 'error', reason)
  note(state .. (reason ~= '' and ': ' .. reason or ''), lines)
end
return 1

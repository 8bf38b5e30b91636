-- Stops a job: no more of its shards come to the lane.
-- KEYS: as in job.lua. ARGV: id, new state, reason ('' = no reason), log lines to keep.
-- Returns 1, or 0 if ended in another state or unknown.
local id, state, reason, lines = unpack(ARGV)

local was = redis.call('HGET', KEYS[1], 'state')
if not was or was ~= state and ENDED[was] then return 0 end
redis.call('UNLINK', KEYS[2])
if was ~= state then
  become(id, state, 'error', reason)
  note(state .. (reason ~= '' and ': ' .. reason or ''), lines)
end
return 1

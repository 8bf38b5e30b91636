-- Fills the lane of a running job and returns its standing; allows a new notice.
-- KEYS: as in job.lua, lane. ARGV: number of workers, most shards to move, group.
-- Returns {state, moved, in todo, in the lane, too many rows failed}, or nil for an unknown job.
local record, todo, in_lane, lane = KEYS[1], KEYS[2], KEYS[3], KEYS[8]

local state, most, was = unpack(redis.call('HMGET', record, 'state', 'max_parallel', 'parallel'))
if not state then return false end
redis.call('HDEL', record, 'noticed')
local is_failed, moved = has_failed(record), 0
if state == 'running' and not is_failed then
  local parallel = tonumber(most) > 0 and most or ARGV[1]
  if parallel ~= was then redis.call('HSET', record, 'parallel', parallel) end
  moved = refill(lane, ARGV[3], tonumber(ARGV[2]))
end
local held = redis.call('HLEN', in_lane)
if moved > 0 then change(record, 'in_lane', held) end
return {state, moved, redis.call('ZCARD', todo), held, is_failed and 1 or 0}

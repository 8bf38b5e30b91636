-- Notes how far a shard is that is being run, and tells whether its job wants it.
-- KEYS: see job.lua. ARGV: index, place, how many of its rows are scored. Returns 1 where the job runs, or is about to again, else 0.
local record, in_lane = KEYS[1], KEYS[3]
local index, place, rows = unpack(ARGV)

local state, known = unpack(redis.call('HMGET', record, 'state', scored(index)))
if state ~= 'running' and state ~= 'planning' then return 0 end
if (known or '0') ~= rows and redis.call('HGET', in_lane, index) == place then
  if rows == '0' then redis.call('HDEL', record, scored(index)) end
  change(record, unpack(rows ~= '0' and {scored(index), rows} or {}))
end
return 1

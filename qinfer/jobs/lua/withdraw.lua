-- Removes the waiting shards of a stopped job from the lane, and held shards if asked.
-- KEYS: as in job.lua, lane. ARGV: id, group, consumers of released shards and of suspects, held ones too (0|1), index and
--   place of each. Returns 1, or 0 if the job is not stopped any more.
local record, in_lane, lane = KEYS[1], KEYS[3], KEYS[8]
local id, group, released, suspects, in_hand = unpack(ARGV, 1, 5)

local state = redis.call('HGET', record, 'state')
if state == 'running' or state == 'planning' then return 0 end
for i = 6, #ARGV, 2 do
  local index, place = ARGV[i], ARGV[i + 1]
  if redis.call('HGET', in_lane, index) == place then
    local stream, entry = entry_at(lane, place)
    local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1) -- an error without deliveries
    local owner = not pending.err and pending[1] and pending[1][2]
    if in_hand == '1' or not owner or owner == released or owner == suspects then
      if owner then redis.call('XACK', stream, group, entry) end
      redis.call('XDEL', stream, entry)
      redis.call('HDEL', in_lane, index)
      redis.call('HDEL', record, scored(index), put_off(index), resume(index))
    end
  end
end
if not state then return 0 end
local held = redis.call('HLEN', in_lane)
change(record, 'in_lane', held)
if held == 0 and not ENDED[state] then notify(id) end
return 1

-- Adds shards to todo; by force also those that succeeded or are in the lane.
-- KEYS: as in job.lua, lane. ARGV: id, group, last ones (0|1), by force (0|1), the job's rows ('' = unchanged), index and
--   frame of each. Returns 1, or 0 if the job is not planning.
local record, todo, in_lane, outcomes, lane = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[8]
local id, group, is_last, is_forced, rows = unpack(ARGV, 1, 5)

if redis.call('HGET', record, 'state') ~= 'planning' then return 0 end
for i = 6, #ARGV, 2 do
  local index, frame = ARGV[i], ARGV[i + 1]
  local place, outcome = redis.call('HGET', in_lane, index), redis.call('HGET', outcomes, index)
  local is_done = place or outcome and string.match(outcome, '^%d+ %d+ 0')
  if is_forced == '1' or not is_done then
    put(todo, index, frame)
    if place then
      local stream, entry = entry_at(lane, place)
      redis.call('XACK', stream, group, entry)
      redis.call('XDEL', stream, entry)
      redis.call('HDEL', in_lane, index)
      redis.call('HDEL', record, scored(index), put_off(index), resume(index))
    end
    if outcome then
      count(record, outcome, -1)
      redis.call('HDEL', outcomes, index)
    end
  end
end

local held = redis.call('HLEN', in_lane)
change(record, 'in_lane', held, unpack(rows ~= '' and {'rows', rows} or {}))
if is_last == '1' then
  local shards = redis.call('ZCARD', todo) + held + redis.call('HLEN', outcomes)
  become(id, 'running', 'shards', shards, 'error', '')
  notify(id)
end
return 1

-- Notes what is known of a shard that is being run, if who does so is its owner still, and has read what is known.
-- KEYS: see job.lua, then the lane. ARGV: index, place, group, owner, what is known ('' = nothing), what is known from now on,
--   a line for the log ('' = none), lines of the log that are kept.
-- Returns 1, also where this was done before, or 0 where the shard has another owner, or no owner.
local record, in_lane, lane = KEYS[1], KEYS[3], KEYS[8]
local index, place, group, owner, was, now, line, lines = unpack(ARGV)

if redis.call('HGET', in_lane, index) ~= place then return 0 end
local stream, entry = entry_at(lane, place)
local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1, owner) -- an error where the stream is gone
if pending.err or not pending[1] then return 0 end
local known = redis.call('HGET', record, resume(index)) or ''
if known == now then return 1 end
if known ~= was then return 0 end
redis.call('HSET', record, resume(index), now)
if line ~= '' then
  note(line, lines)
  change(record)
end
return 1

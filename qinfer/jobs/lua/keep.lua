-- Replaces the note on a held shard, if the caller still owns it and has read the latest note.
-- KEYS: as in job.lua, lane. ARGV: index, place, group, owner, note that was read ('' = no note), new note, line for the log
--   ('' = no line), log lines to keep. Returns 1, also for a repetition, or 0 for another owner or note.
local record, in_lane, lane = KEYS[1], KEYS[3], KEYS[8]
local index, place, group, owner, was, now, line, lines = unpack(ARGV)

if redis.call('HGET', in_lane, index) ~= place then return 0 end
local stream, entry = entry_at(lane, place)
local pending = redis.pcall('XPENDING', stream, group, entry, entry, 1, owner) -- an error if the stream is gone
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

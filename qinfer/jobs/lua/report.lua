-- Records a shard's progress, or why it was put off.
-- KEYS: as in job.lua. ARGV: index, place, scored rows, why it was put off ('' = it goes on), log lines to keep.
-- Returns 1 if the job runs or is about to, else 0.
local LATEST = 20 -- a reason is not repeated within this many lines
local record, in_lane, log = KEYS[1], KEYS[3], KEYS[5]
local index, place, rows, reason, lines = unpack(ARGV)

local state, known, was = unpack(redis.call('HMGET', record, 'state', scored(index), put_off(index)))
if state ~= 'running' and state ~= 'planning' then return 0 end
if redis.call('HGET', in_lane, index) ~= place then return 1 end
local is_tried = rows == '0' and reason == '' -- tells no reason
local has_news = not is_tried and (was or '') ~= reason
if (known or '0') == rows and not has_news then return 1 end

local fields = {}
if rows == '0' then redis.call('HDEL', record, scored(index)) else fields = {scored(index), rows} end
if has_news and reason == '' then redis.call('HDEL', record, put_off(index)) end
if has_news and reason ~= '' then
  fields[#fields + 1], fields[#fields + 2] = put_off(index), reason
  local line, is_said = 'a shard waits: ' .. reason, false
  for _, text in ipairs(redis.call('LRANGE', log, -LATEST, -1)) do is_said = is_said or string.match(text, '^%d+ (.*)$') == line end
  if not is_said then note(line, lines) end
end
change(record, unpack(fields))
return 1

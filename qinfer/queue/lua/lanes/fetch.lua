-- Takes up to `count` entries, lane after lane: of each, released ones first that are ready, then new ones.
-- KEYS: the lanes by priority. ARGV: group, consumer, consumer of what was released, count (> 0).
-- Returns {lane's number, id, fields, deliveries} per entry.
local group, consumer, released, left = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local taken = {}

-- Every lane is asked before anything is taken: a missing group raises NOGROUP here, and no entry is lost with the reply.
local waiting = {}
for number, lane in ipairs(KEYS) do
  waiting[number] = redis.call('XPENDING', lane, group, 'IDLE', READY_MS, '-', '+', left, released)
end

for number, lane in ipairs(KEYS) do
  for _, pending in ipairs(waiting[number]) do
    if left == 0 then return taken end
    local entry = redis.call('XCLAIM', lane, group, consumer, 0, pending[1])[1]
    if entry then
      taken[#taken + 1] = {number, entry[1], entry[2], pending[4] + 1}
      left = left - 1
    else
      redis.call('XACK', lane, group, pending[1]) -- its body is gone; 6.2 keeps such an id for ever
    end
  end
  if left == 0 then return taken end
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', left, 'STREAMS', lane, '>')
  if reply then
    for _, entry in ipairs(reply[1][2]) do
      taken[#taken + 1] = {number, entry[1], entry[2], 1}
      left = left - 1
    end
  end
end
return taken

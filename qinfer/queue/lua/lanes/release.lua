-- Gives back the entries that `consumer` still owns, as if they had not been delivered this time.
-- KEYS: the lane. ARGV: group, consumer, consumer of what was released (or of suspects), for how many ms nobody is to take them,
-- entry ids. Returns how many were given back.
local lane, group, consumer, released, rest = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local DAY_MS = 86400000
local idle = rest > 0 and READY_MS - rest or DAY_MS
local count = 0

for i = 5, #ARGV do
  local id = ARGV[i]
  local pending = held(lane, group, consumer, id)
  if pending then
    redis.call('XCLAIM', lane, group, released, 0, id, 'IDLE', idle, 'RETRYCOUNT', pending[4] - 1, 'JUSTID')
    ended(lane, id)
    count = count + 1
  end
end
return count

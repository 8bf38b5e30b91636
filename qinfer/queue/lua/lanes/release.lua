-- Releases the entries that `consumer` still owns, without counting this delivery.
-- KEYS: lane. ARGV: group, consumer, `released` or `suspects`, rest (ms), ids. Returns how many.
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

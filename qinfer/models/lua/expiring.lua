-- Writes an expiring record, if given; returns id and record of all live ones.
-- KEYS: records. ARGV: id, ms to live, record; or nothing.
local now = now_ms()
if ARGV[1] then
  redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[2], ARGV[3]))
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
end
local found, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #found, 2 do
  local ends_ms, record = string.match(found[i + 1], '^(%d+) (.*)$')
  if tonumber(ends_ms) > now then
    table.insert(live, found[i])
    table.insert(live, record)
  else
    redis.call('HDEL', KEYS[1], found[i])
  end
end
return live

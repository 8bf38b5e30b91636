-- Takes tasks of a labeling project that wait.
-- KEYS: entries, data, due. ARGV: how many at most, the lease in milliseconds.
-- Returns {entry, data or ''} for each.
local entries, data, due = KEYS[1], KEYS[2], KEYS[3]
local now, found = now_ms(), {}
for _, task in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local entry = redis.call('HGET', entries, task)
  if entry then
    redis.call('ZADD', due, now + ARGV[2], task)
    found[#found + 1] = {entry, redis.call('HGET', data, task) or ''}
  else
    redis.call('ZREM', due, task)
  end
end
return found

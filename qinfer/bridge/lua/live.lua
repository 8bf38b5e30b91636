-- Returns the messages in hand of live bridges, and the names of the last reported routes.
-- KEYS: live bridges, routes. ARGV: ms that a route is kept, most routes.
local now = now_ms()
local found, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #found, 2 do
  local ends_ms, uses = string.match(found[i + 1], '^(%d+) %d+ (.*)$')
  if tonumber(ends_ms) > now then table.insert(live, uses) end
end
local since = string.format('%.0f', now - ARGV[1])
return {live, redis.call('ZREVRANGEBYSCORE', KEYS[2], '+inf', since, 'LIMIT', 0, ARGV[2])}

-- Adds a bridge's report; one that arrives after its successor has no effect.
-- KEYS: live bridges, routes, the counts of each route. ARGV: ms that a bridge's number is kept, ms that a route is kept,
--   process, ms that the report holds, its number, messages in hand, then for each route its name, number of counts, counts.
local now = now_ms()
local remembered_ms, kept_ms, process, ttl_ms, number = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local known = redis.call('HGET', KEYS[1], process)
local last = known and tonumber(string.match(known, '^%d+ (%d+) ')) or 0
if number < last then return end
redis.call('HSET', KEYS[1], process, string.format('%.0f %d %s', now + ttl_ms, number, ARGV[6]))
redis.call('PEXPIRE', KEYS[1], ttl_ms + remembered_ms)
local found = redis.call('HGETALL', KEYS[1])
for i = 1, #found, 2 do
  if tonumber(string.match(found[i + 1], '^%d+')) + remembered_ms < now then
    redis.call('HDEL', KEYS[1], found[i])
  end
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('(%.0f', now - kept_ms))
local at = 7
for i = 3, #KEYS do
  redis.call('ZADD', KEYS[2], string.format('%.0f', now), ARGV[at])
  local fields = tonumber(ARGV[at + 1])
  at = at + 2
  assert(at + 2 * fields - 1 <= #ARGV, 'there are fewer ARGV than counts of a route')
  for _ = 1, fields do
    if number > last then redis.call('HINCRBY', KEYS[i], ARGV[at], ARGV[at + 1]) end
    at = at + 2
  end
  redis.call('PEXPIRE', KEYS[i], kept_ms)
end
redis.call('PEXPIRE', KEYS[2], kept_ms)

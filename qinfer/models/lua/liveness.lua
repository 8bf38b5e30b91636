-- Marks a process as live, if given; returns the live processes.
-- KEYS: live processes. ARGV: process, ms to live; or nothing.
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if #ARGV == 2 then
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
  if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
end
return redis.call('ZRANGE', KEYS[1], 0, -1)

-- Writes fields of an operation that runs.
-- KEYS: operation. ARGV: ttl (ms), names and values. Returns its state before, or nil if it is gone.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'running' then
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return state

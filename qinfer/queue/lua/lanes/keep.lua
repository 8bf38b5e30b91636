-- Extends a reply stream's life, or creates it, atomically: no stream is ever without a time to live.
-- KEYS: stream. ARGV: ttl (ms). Returns 1 if it did not exist.
local gone = redis.call('TYPE', KEYS[1]).ok ~= 'stream'

if gone then
  redis.call('DEL', KEYS[1])
  redis.call('XADD', KEYS[1], '*', 'h', '')
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return gone and 1 or 0

-- Puts off the end of a reply stream, or makes a new one: in one step, so that none is ever without a time to live.
-- KEYS: the stream. ARGV: its time to live in ms. Returns 1 where there was none, or something else in its place.
local gone = redis.call('TYPE', KEYS[1]).ok ~= 'stream'

if gone then
  redis.call('DEL', KEYS[1])
  redis.call('XADD', KEYS[1], '*', 'h', '')
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return gone and 1 or 0

-- Appends a reply even with full memory, because answered requests free memory: Redis refuses growth only as a script's
-- first write, and PEXPIRE goes first.
-- KEYS: stream. ARGV: ttl (ms), reply. Returns the entry's id, or nil if the stream is gone.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  return false
end
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', 'r', ARGV[2])

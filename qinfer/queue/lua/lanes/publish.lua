-- Appends a reply to its stream even if memory is full, because answered requests free memory. Redis refuses growth only
-- as a script's first write; PEXPIRE goes first.
-- KEYS: the stream. ARGV: its time to live in ms, the reply. Returns the entry's id, or nil if the stream is gone.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  return false
end
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', 'r', ARGV[2])

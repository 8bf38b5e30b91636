-- Appends a reply to its stream though Redis's memory is full: what is answered can leave the queue, and frees memory.
-- Redis refuses growth only as a script's first write, and to put off the stream's end is none.
-- KEYS: the stream. ARGV: its time to live in ms, the reply. Returns the entry's id, or nothing where it is gone.
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then
  return false
end
return redis.call('XADD', KEYS[1], 'NOMKSTREAM', '*', 'r', ARGV[2])

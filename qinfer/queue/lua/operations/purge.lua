-- Removes dead letters, and counts them.
-- KEYS: letters, operation. ARGV: ids. Returns how many.
local removed = redis.call('XDEL', KEYS[1], unpack(ARGV))
count_changed(KEYS[2], removed)
return removed

-- Ends the lease of a worker without sequences.
-- KEYS: the owners, its sequences. ARGV: prefix, is_fragile, worker, its lanes. Returns whether it did.
begin(ARGV[1], ARGV[2])
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('ZREM', KEYS[1], ARGV[3])
for i = 4, #ARGV do close_lane(ARGV[i]) end
return 1

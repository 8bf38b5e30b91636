-- Ends the lease of a worker without sequences.
-- KEYS: the owners, its sequences, its lanes. ARGV: worker. Returns whether it did.
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 1

-- Gives a lease back; returns 1 if the owner had it. KEYS: lease. ARGV: owner.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])

-- Gives the lease of who decides about canaries back. KEYS: lease. ARGV: owner. Returns 1 if the owner had it.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])

-- Takes, renews, or gives back a lease; returns 1 if the owner has, or had, it.
-- KEYS: lease. ARGV: owner, ms (0 = give back).
local holder, ms = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if holder and holder ~= ARGV[1] or not holder and ms == 0 then return 0 end
if ms == 0 then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ms)
return 1

-- Replaces the installation's id if it is the expected one; returns the present id.
-- KEYS: installation. ARGV: expected id ('' = none), new id, ms to live (0 = for ever).
local present = redis.call('GET', KEYS[1]) or ''
if present ~= ARGV[1] then return present end
redis.call('SET', KEYS[1], ARGV[2])
if tonumber(ARGV[3]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return ARGV[2]

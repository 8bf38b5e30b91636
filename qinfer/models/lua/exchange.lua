-- Replaces the installation's id, if it is what the caller has seen.
-- KEYS: installation. ARGV: what was seen, empty = nothing; the new value; for how many ms, 0 = for ever.
-- Returns what is there now: the new value, or what another has written.
local present = redis.call('GET', KEYS[1]) or ''
if present ~= ARGV[1] then return present end
redis.call('SET', KEYS[1], ARGV[2])
if tonumber(ARGV[3]) > 0 then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return ARGV[2]

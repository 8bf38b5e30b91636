-- Takes note of how many bytes of a tenant's outputs are stored beside a reply stream, or are to be; needs requests/stored.lua.
-- KEYS: result. ARGV: what the partition's keys begin with, tenant, id, bytes (0 = none are any more), time to live in ms.
-- Returns 1, or 0: the tenant has as many bytes stored as it may, and nothing was done.
local prefix, tenant, id, bytes, ttl = unpack(ARGV)
if bytes ~= '0' and is_over(prefix, tenant, tonumber(bytes)) then return 0 end

note_stored(prefix, tenant, id, tonumber(bytes), now_ms() + tonumber(ttl))
return 1

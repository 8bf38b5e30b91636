-- Records the bytes of a tenant's outputs beside a reply stream; needs requests/stored.lua.
-- KEYS: result. ARGV: prefix, tenant, id, bytes (0 = removed), ttl (ms). Returns 1, or 0 if the tenant has stored too
--   much.
local prefix, tenant, id, bytes, ttl = unpack(ARGV)
if bytes ~= '0' and is_over(prefix, tenant, tonumber(bytes)) then return 0 end

note_stored(prefix, tenant, id, tonumber(bytes), now_ms() + tonumber(ttl))
return 1

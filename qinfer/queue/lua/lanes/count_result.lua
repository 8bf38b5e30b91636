-- Records the bytes of a tenant's outputs beside a reply stream; needs requests/stored.lua.
-- KEYS: result. ARGV: prefix, tenant, id, bytes (0 = removed), ttl (ms), room for files ('' = in Redis). Returns
--   1, or 0 if the tenant has stored too much.
local prefix, tenant, id, bytes, ttl, free = unpack(ARGV)
bytes, free = tonumber(bytes), tonumber(free)
if bytes == 0 then
  note_removed(prefix, tenant, id)
  return 1
end

if free then prefix = prefix .. FILES end
local more = bytes - tonumber(redis.call('HGET', prefix .. 'stored:' .. tenant, id) or '0') -- it may be stored again
if more > 0 and is_over(prefix, tenant, more, free) then return 0 end

note_stored(prefix, tenant, id, bytes, now_ms() + tonumber(ttl))
return 1

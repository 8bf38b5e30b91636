-- Appends an entry, with its payload, unless so many as `limit` wait already; a tenant's to the stream that it has of the lane.
-- KEYS: the lane, its `.delayed` lane, the payload (none without).
-- ARGV: group, limit (0 = none), the tenant ('' = none), its weight (0 = not known), frame, and with a payload: the request's id, the
-- payload's time to live in ms (0 = it is stored already), the payload.
-- Returns {the entry's id, the number of its share, of the tenant's, whether others have that, too}, or nil where the lane is full.
local lane, delayed, payload = KEYS[1], KEYS[2], KEYS[3]
local group, limit, tenant, weight, frame = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]

local route = route_of(lane, group, tenant, weight)
if is_full(lane, route.share, delayed, limit, group, true) then return false end

local fields = {'f', frame}
if payload then
  if ARGV[7] ~= '0' then redis.call('SET', payload, ARGV[8], 'PX', ARGV[7]) end
  fields[3], fields[4] = 'p', ARGV[6]
end
if route.is_marked then fields[#fields + 1], fields[#fields + 2] = 'd', '1' end
return {redis.call('XADD', route.stream, '*', unpack(fields)), route.number, route.share, route.is_shared and 1 or 0}

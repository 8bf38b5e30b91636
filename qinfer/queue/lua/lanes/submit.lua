-- Appends entries to their tenant's share of a lane until `limit` wait, or a single entry with its payload.
-- KEYS: lane, its `.delayed` lane, payload (optional). ARGV: group, limit (0 = none), tenant, weight (0 = unknown),
--   endpoint, request, ttl (ms, 0 = already stored), payload, frames. Absent texts are ''.
-- Returns {share of the tenant, whether others use it, share of the first entry, ids}; the last frames may have no
--   room.
local lane, delayed, payload = KEYS[1], KEYS[2], KEYS[3]
local group, limit, tenant, weight = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local endpoint, request, ttl, before = ARGV[5], ARGV[6], ARGV[7], 8

local route = route_of(lane, group, tenant, weight)
local count = room(lane, route.share, delayed, limit, group, true, #ARGV - before)
if count > 0 and payload and ttl ~= '0' then redis.call('SET', payload, ARGV[8], 'PX', ttl) end

local fields = payload and {'p', request} or {}
mark_origin(fields, endpoint, tenant, '')
local reply = {route.share, route.is_shared and 1 or 0, route.number}
local first = before + 1
if count > 0 and route.is_marked then
  fields[#fields + 1], fields[#fields + 2] = 'd', '1'
  reply[4] = redis.call('XADD', route.stream, '*', 'f', ARGV[first], unpack(fields))
  fields[#fields], fields[#fields - 1] = nil, nil
  first, count = first + 1, count - 1
end
local stream = stream_of(lane, route.share)
for i = first, first + count - 1 do
  reply[#reply + 1] = redis.call('XADD', stream, '*', 'f', ARGV[i], unpack(fields))
end
return reply

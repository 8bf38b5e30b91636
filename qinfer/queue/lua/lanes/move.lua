-- Moves an endpoint's waiting entries (untaken or released) to the same lane of another version, as never delivered,
-- with their first enqueue time, to their tenant's share. Records of asynchronous requests, or notes, get the new
-- place.
-- KEYS: lane, other, notes. ARGV: group, released, endpoint, prefix, version, name, entries and bytes to look at,
--   lifetime of the notes (ms), first share, first id there ('(' = behind it).
-- Returns {moved, next share, next id}, or {moved} at the end.
local lane, other, notes = KEYS[1], KEYS[2], KEYS[3]
local group, released, endpoint, prefix, version, name = unpack(ARGV, 1, 6)
local left, room, kept = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local first, start = tonumber(ARGV[10]), ARGV[11]
local moved = 0

-- Tells whether an entry waits, taking a released one from its pseudo-owner.
local function waits(stream, id)
  local pending = redis.pcall('XPENDING', stream, group, id, id, 1)
  local owner = not pending.err and pending[1] and pending[1][2]
  if owner == released then redis.call('XACK', stream, group, id) end
  return not owner or owner == released
end

local function weight_of(tenant)
  return tonumber(string.match(redis.call('HGET', lane .. '~tenants', tenant) or '', ' (%d+)$') or 0)
end

local function move(stream, id, fields, about)
  local tenant = about.t or ''
  local route = route_of(other, group, tenant, tenant ~= '' and weight_of(tenant) or 0)
  fields[#fields + 1], fields[#fields + 2] = 'o', about.o or id
  if route.is_marked then fields[#fields + 1], fields[#fields + 2] = 'd', '1' end
  local new = redis.call('XADD', route.stream, '*', unpack(fields))
  redis.call('XDEL', stream, id)
  if about.r then
    local record = prefix .. 'request:' .. about.r
    if redis.call('HGET', record, 'entry') == id then
      redis.call('HSET', record, 'version', version, 'lane', stream_of(name, route.number), 'entry', new)
    end
  else
    redis.call('HSET', notes, string.sub(stream, #prefix + 1) .. ':' .. id, string.sub(route.stream, #prefix + 1) .. ':' .. new)
  end
  moved = moved + 1
end

-- Returns whether an entry is to be moved, the fields that it keeps, and all fields by name.
local function look(stream, entry)
  local about, fields = {}, {}
  for f = 1, #entry[2], 2 do
    local field, value = entry[2][f], entry[2][f + 1]
    about[field] = value
    if field ~= 'o' and field ~= 'd' then fields[#fields + 1], fields[#fields + 2] = field, value end
  end
  return about.e == endpoint and waits(stream, entry[1]), fields, about
end

redis.call('XACK', lane, group, '0-0') -- for full memory
for _, stream in ipairs(streams_of(lane)) do
  if stream[1] >= first then
    local at = stream[1] == first and start or '-'
    while at do
      local entry = redis.call('XRANGE', stream[2], at, '+', 'COUNT', 1)[1]
      if entry and (left < 1 or room < 1) then
        if moved > 0 then redis.call('PEXPIRE', notes, kept) end
        return {moved, stream[1], entry[1]}
      end
      at = entry and '(' .. entry[1]
      if entry then
        left, room = left - 1, room - #entry[2][2]
        local is_due, fields, about = look(stream[2], entry)
        if is_due then move(stream[2], entry[1], fields, about) end
      end
    end
  end
end
if moved > 0 then redis.call('PEXPIRE', notes, kept) end
return {moved}

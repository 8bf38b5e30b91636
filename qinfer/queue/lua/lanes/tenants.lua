-- KEYS: lanes. ARGV: tenants to name per lane, group. Returns {number, entries, weight, tenants, waiting} of each
--   lane's shares.
local found, most, group = {}, tonumber(ARGV[1]), ARGV[2]
for i, lane in ipairs(KEYS) do
  local names, tenants = {}, {}
  if redis.call('HLEN', lane .. '~tenants') > 0 then
    names = redis.call('ZREVRANGE', lane .. '~seen', 0, most - 1)
  end
  for _, tenant in ipairs(names) do
    local place = redis.call('HGET', lane .. '~tenants', tenant)
    local number = place and tonumber(string.match(place, '^%d+'))
    if number then
      tenants[number] = tenants[number] or {}
      table.insert(tenants[number], tenant)
    end
  end
  found[i] = {}
  for _, stream in ipairs(streams_of(lane)) do
    local waits = waiting(stream[2], group, false)
    found[i][#found[i] + 1] = {stream[1], redis.call('XLEN', stream[2]), stream[3], tenants[stream[1]] or {}, waits}
  end
end
return found

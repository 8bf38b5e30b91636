-- KEYS: lanes. ARGV: nothing, or tenants to name per lane and group. Returns {number, entries, weight} of each lane's
--   shares, itself first, and if there are ARGV also tenants and waiting entries.
local found, most, group = {}, tonumber(ARGV[1] or '0'), ARGV[2]
for i, lane in ipairs(KEYS) do
  local names, tenants = {}, {}
  if most > 0 and redis.call('HLEN', lane .. '~tenants') > 0 then
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
    local share = {stream[1], redis.call('XLEN', stream[2]), stream[3]}
    if most > 0 then share[4], share[5] = tenants[stream[1]] or {}, waiting(stream[2], group, false) end
    found[i][#found[i] + 1] = share
  end
end
return found

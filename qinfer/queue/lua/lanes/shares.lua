-- KEYS: lanes. Returns {number, entries, weight} of each lane's shares, itself first.
local found = {}
for i, lane in ipairs(KEYS) do
  found[i] = {}
  for _, stream in ipairs(streams_of(lane)) do
    found[i][#found[i] + 1] = {stream[1], redis.call('XLEN', stream[2]), stream[3]}
  end
end
return found

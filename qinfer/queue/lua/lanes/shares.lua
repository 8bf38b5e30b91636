-- KEYS: lanes. Returns {number, entries, weight} of the shares of each lane, the lane itself first.
local found = {}
for i, lane in ipairs(KEYS) do
  found[i] = {}
  for _, stream in ipairs(streams_of(lane)) do
    found[i][#found[i] + 1] = {stream[1], redis.call('XLEN', stream[2]), stream[3]}
  end
end
return found

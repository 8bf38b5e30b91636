-- Returns the indices of shards that the lane lost. KEYS: in_lane, lane.
local missing = {}

local held = redis.call('HGETALL', KEYS[1])
for i = 1, #held, 2 do
  local stream, entry = entry_at(KEYS[2], held[i + 1])
  if not redis.call('XRANGE', stream, entry, entry)[1] then missing[#missing + 1] = held[i] end
end
return missing

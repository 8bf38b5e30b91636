-- KEYS: lanes. Returns for each, with its shares, the entries, and the first entry's id in its first lane.
local found = {}

local function first_of(stream)
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local origin = first and first[1] or ''
  for f = 1, #(first and first[2] or {}), 2 do
    if first[2][f] == 'o' then origin = first[2][f + 1] end
  end
  return origin
end

local function time_of(id) return tonumber(string.match(id, '^%d+')) or math.huge end

for i, lane in ipairs(KEYS) do
  local entries, oldest = 0, ''
  for _, stream in ipairs(streams_of(lane)) do
    local length = redis.call('XLEN', stream[2])
    local first = length > 0 and first_of(stream[2]) or ''
    if time_of(first) < time_of(oldest) then oldest = first end
    entries = entries + length
  end
  found[2 * i - 1], found[2 * i] = entries, oldest
end
return found

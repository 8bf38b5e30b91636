-- Returns for each of KEYS, lanes, how many entries it holds, and the id that its first one had in its first lane.
local found = {}
for i, lane in ipairs(KEYS) do
  local first = redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
  local origin = first and first[1] or ''
  for f = 1, #(first and first[2] or {}), 2 do
    if first[2][f] == 'o' then origin = first[2][f + 1] end
  end
  found[2 * i - 1] = redis.call('XLEN', lane)
  found[2 * i] = origin
end
return found

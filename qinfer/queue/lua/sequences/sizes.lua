-- Counts sequences: open ones, those that wait for an owner, and those that were ever handed over, and lost.
-- KEYS: the open sequences, the counts, the lanes in which sequences wait. Returns the four numbers.
local waiting = 0
local tenants = redis.call('HKEYS', KEYS[1] .. '~')
for i = 3, #KEYS do
  local first = redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)[1]
  waiting = waiting + redis.call('XLEN', KEYS[i]) - (first and first[2][2] == '' and 1 or 0) -- a blank one wakes workers
  for _, tenant in ipairs(tenants) do waiting = waiting + redis.call('XLEN', KEYS[i] .. '~' .. tenant) end
end
local counts = redis.call('HMGET', KEYS[2], 'handed_over', 'lost')
return {redis.call('ZCARD', KEYS[1]), waiting, tonumber(counts[1] or 0) or 0, tonumber(counts[2] or 0) or 0}

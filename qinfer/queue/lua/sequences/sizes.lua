-- KEYS: the open sequences, the counts, the lanes of waiting ones. Returns how many are open, waiting, ever handed
--   over, ever lost.
local waiting = 0
local tenants = redis.call('HKEYS', KEYS[1] .. '~')
for i = 3, #KEYS do
  local first = redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', 1)[1]
  waiting = waiting + redis.call('XLEN', KEYS[i]) - (first and first[2][2] == '' and 1 or 0) -- a blank ticket is no sequence
  for _, tenant in ipairs(tenants) do waiting = waiting + redis.call('XLEN', KEYS[i] .. '~' .. tenant) end
end
local counts = redis.call('HMGET', KEYS[2], 'handed_over', 'lost')
return {redis.call('ZCARD', KEYS[1]), waiting, tonumber(counts[1] or 0) or 0, tonumber(counts[2] or 0) or 0}

-- Counts the steps of sequences without an owner, after a thousand sequences one each.
-- KEYS: the open sequences, the lanes of waiting ones. ARGV: prefix, is_fragile.
begin(ARGV[1], ARGV[2])
local left, steps = 1000, 0

local function add(lane)
  local tickets = left > 0 and redis.call('XRANGE', lane, '-', '+', 'COUNT', left) or {}
  for _, ticket in ipairs(tickets) do
    if ticket[2][2] ~= '' then steps = steps + redis.call('XLEN', steps_of(ticket[2][2])) end
  end
  left = left - #tickets
  steps = steps + redis.call('XLEN', lane) - #tickets
end

local tenants = redis.call('HKEYS', KEYS[1] .. '~')
for i = 2, #KEYS do
  add(KEYS[i])
  for _, tenant in ipairs(tenants) do add(KEYS[i] .. '~' .. tenant) end
end
return steps

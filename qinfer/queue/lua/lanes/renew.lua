-- Renews the leases that `worker` still owns. KEYS: lane. ARGV: group, worker, entry ids. Returns the lost ids.
local lane, group, worker = KEYS[1], ARGV[1], ARGV[2]
local lost = {}

for i = 3, #ARGV do
  local id = ARGV[i]
  local pending = held(lane, group, worker, id)
  if pending then
    redis.call('XCLAIM', lane, group, worker, 0, id, 'JUSTID') -- JUSTID: the delivery count stays
  else
    lost[#lost + 1] = id
  end
end
return lost

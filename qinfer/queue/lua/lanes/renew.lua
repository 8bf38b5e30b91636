-- Renews the leases that `consumer` still owns.
-- KEYS: the lane. ARGV: group, consumer, entry ids. Returns the ids that are lost.
local lane, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local lost = {}

for i = 3, #ARGV do
  local id = ARGV[i]
  if #redis.call('XPENDING', lane, group, id, id, 1, consumer) == 0 then
    lost[#lost + 1] = id
  else
    redis.call('XCLAIM', lane, group, consumer, 0, id, 'JUSTID') -- JUSTID: the delivery count stays
  end
end
return lost

-- Removes the entries that wait, undelivered or given back, with their payloads.
-- KEYS: the lane, then the payloads of the first entries. ARGV: group, consumers of what was released and of suspects,
-- entry ids. Returns {for each entry 1 if it was removed, else 0; names of the objects that the payloads referred to}.
local lane, group, released, suspects = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local removed, gone = {}, {}

for i = 4, #ARGV do
  local id, payload, count = ARGV[i], KEYS[i - 2], 0
  local pending = redis.pcall('XPENDING', lane, group, id, id, 1) -- NOGROUP: nothing was ever delivered
  local owner = not pending.err and pending[1] and pending[1][2]
  if not owner or owner == released or owner == suspects then
    if owner then redis.call('XACK', lane, group, id) end
    count = redis.call('XDEL', lane, id)
    if count == 1 and payload then drop(payload, gone) end
  end
  removed[#removed + 1] = count
end
return {removed, gone}

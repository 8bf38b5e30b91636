-- Removes waiting entries, undelivered or released, including moved entries, with their payloads.
-- KEYS: lane, moved, the first entries' payloads. ARGV: group, released, suspects, place (lane without prefix), ids.
--   Returns {1 or 0 for each entry, unreferenced objects}.
local lane, moved = KEYS[1], KEYS[2]
local group, released, suspects, place = unpack(ARGV, 1, 4)
local removed, gone = {}, {}

local function remove(from, id)
  local pending = redis.pcall('XPENDING', from, group, id, id, 1)
  local owner = not pending.err and pending[1] and pending[1][2]
  if owner and owner ~= released and owner ~= suspects then return 0 end
  if owner then redis.call('XACK', from, group, id) end
  return redis.call('XDEL', from, id)
end

for i = 5, #ARGV do
  local id, payload = ARGV[i], KEYS[i - 2]
  local count = remove(lane, id)
  if count == 0 then
    local its_place, its_id = moved_to(moved, place, id)
    if its_id then count = remove(string.sub(lane, 1, -#place - 1) .. its_place, its_id) end
  end
  if count == 1 and payload then drop(payload, gone) end
  removed[#removed + 1] = count
end
return {removed, gone}

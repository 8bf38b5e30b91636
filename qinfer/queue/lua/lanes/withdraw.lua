-- Removes the entries that wait, undelivered or given back, with their payloads; also where they were moved.
-- KEYS: the lane, the notes of what was moved, then the payloads of the first entries. ARGV: group, consumers of what was released and of
-- suspects, the lane without what the partition's keys begin with, entry ids.
-- Returns {for each entry 1 if it was removed, else 0; names of the objects that the payloads referred to}.
local lane, moved = KEYS[1], KEYS[2]
local group, released, suspects, place = unpack(ARGV, 1, 4)
local removed, gone = {}, {}

local function remove(from, id)
  local pending = redis.pcall('XPENDING', from, group, id, id, 1) -- NOGROUP: nothing was ever delivered
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

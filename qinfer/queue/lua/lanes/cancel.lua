-- Removes entries, including moved entries, with their payloads; notes delivered entries.
-- KEYS: lane, moved, payloads, cancels. ARGV: group, place (lane without prefix), ids. Returns unreferenced objects.
local lane, moved, notes = KEYS[1], KEYS[2], KEYS[#KEYS]
local group, place = ARGV[1], ARGV[2]
local gone = {}

local function remove(from, its_place, ids)
  local delivered = {}
  for _, id in ipairs(ids) do
    local pending = redis.pcall('XPENDING', from, group, id, id, 1)
    if pending[1] then delivered[#delivered + 1] = id end
  end
  redis.pcall('XACK', from, group, unpack(ids))
  redis.call('XDEL', from, unpack(ids))
  ended(from, unpack(ids))
  return function() note_cancel(notes, its_place, delivered) end
end

local noting = {remove(lane, place, {unpack(ARGV, 3)})}
if redis.call('EXISTS', moved) == 1 then
  for i = 3, #ARGV do
    local its_place, id = moved_to(moved, place, ARGV[i])
    if id then noting[#noting + 1] = remove(string.sub(lane, 1, -#place - 1) .. its_place, its_place, {id}) end
  end
end
for i = 3, #KEYS - 1 do drop(KEYS[i], gone) end
for _, note in ipairs(noting) do note() end
return gone

-- Removes entries from their lane, delivered or not, whoever owns them, with their payloads, and notes those that were delivered.
-- KEYS: the lane, then payloads, the notes. ARGV: group, the lane without what the partition's keys begin with, entry ids.
-- Returns the names of the objects that the payloads referred to.
local lane, notes = KEYS[1], KEYS[#KEYS]
local group, place = ARGV[1], ARGV[2]
local delivered, gone = {}, {}

for i = 3, #ARGV do
  local pending = redis.pcall('XPENDING', lane, group, ARGV[i], ARGV[i], 1) -- NOGROUP: nothing was ever delivered
  if pending[1] then delivered[#delivered + 1] = ARGV[i] end
end

redis.pcall('XACK', lane, group, unpack(ARGV, 3))
redis.call('XDEL', lane, unpack(ARGV, 3))
for i = 2, #KEYS - 1 do drop(KEYS[i], gone) end
note_cancel(notes, place, delivered)
return gone

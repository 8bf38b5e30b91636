-- Reads stored responses, or the size of the first if it is too large for this connection.
-- KEYS: responses. ARGV: index, most bytes.
local found, index, room, step = {}, tonumber(ARGV[1]), tonumber(ARGV[2]), 1

while true do
  local some = redis.call('LRANGE', KEYS[1], index, index + step - 1)
  for _, response in ipairs(some) do
    room = room - #response
    if room < 0 then return #found == 0 and #response or found end
    found[#found + 1] = response
  end
  if #some < step then return found end
  index, step = index + step, math.min(2 * step, 128) -- few large ones are read in vain
end

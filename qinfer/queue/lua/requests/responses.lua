-- Reads stored responses of an asynchronous request; if the first is too large, returns its size, to be read over
-- another connection.
-- KEYS: responses. ARGV: first index, most bytes. Returns the responses, or a size.
local found, index, room, step = {}, tonumber(ARGV[1]), tonumber(ARGV[2]), 1

while true do
  local some = redis.call('LRANGE', KEYS[1], index, index + step - 1)
  for _, response in ipairs(some) do
    room = room - #response
    if room < 0 then return #found == 0 and #response or found end
    found[#found + 1] = response
  end
  if #some < step then return found end
  index, step = index + step, math.min(2 * step, 128) -- large ones are few, so few are read in vain
end

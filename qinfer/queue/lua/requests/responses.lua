-- Reads the responses that are stored of an asynchronous request, from one on, or says how large that is where it is larger
-- than what may be read: it is then read over another connection.
-- KEYS: responses. ARGV: the index of the first, how many bytes are read at most. Returns the responses, or a size.
local found, index, room, step = {}, tonumber(ARGV[1]), tonumber(ARGV[2]), 1

while true do
  local some = redis.call('LRANGE', KEYS[1], index, index + step - 1)
  for _, response in ipairs(some) do
    room = room - #response
    if room < 0 then return #found == 0 and #response or found end
    found[#found + 1] = response
  end
  if #some < step then return found end
  index, step = index + step, math.min(2 * step, 128) -- large ones are few: not many are read in vain
end

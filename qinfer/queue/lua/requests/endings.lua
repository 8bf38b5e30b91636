-- Takes ended requests with records and results from a named outbox.
-- KEYS: queue. ARGV: count, pause (ms), prefix, room (bytes of results), the record's fields, state first.
-- Returns {id, attempts, request, notes, values, result's place (none | given | apart), result} of each; fewer with
--   large results.
local queue, pause, prefix, room = KEYS[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local BESIDES = 500 -- bytes of an ending without its result
local taken = {}

take(queue, tonumber(ARGV[1]), pause, pause, function(id, attempts, request, notes)
  if room <= 0 then return false end
  local values = redis.call('HMGET', prefix .. 'request:' .. request, unpack(ARGV, 5))
  if values[1] == 'queued' then -- its replayed dead letter will end again
    done(queue, id)
    return true
  end

  local result, place, blob = prefix .. 'result:' .. request, 'none', ''
  local size = redis.pcall('STRLEN', result)
  if type(size) == 'table' then -- an object
    place, size = 'apart', tonumber(redis.call('HGET', result, 'size'))
  elseif size > room then
    place = 'apart'
  elseif size > 0 then
    place, blob = 'given', redis.call('GET', result)
  end
  taken[#taken + 1] = {id, attempts, request, notes, values, place, blob}
  room = room - size - BESIDES
  return true
end)
return taken

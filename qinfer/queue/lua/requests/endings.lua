-- Takes ended requests from an outbox that a program named, each with its record and result.
-- KEYS: the outbox's queue. ARGV: how many at most, ms until they are due again, what the partition's keys begin with, how
--   many bytes of results are passed on here, the record's fields; the first is the state.
-- Returns {id, attempts, id of the request, notes, values of the record's fields, result's place (none | given | apart),
--   result} of each; where results are large, fewer than there are.
local queue, pause, prefix, room = KEYS[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local BESIDES = 500 -- so many bytes are the rest of an ending, about
local taken = {}

take(queue, tonumber(ARGV[1]), pause, pause, function(id, attempts, request, notes)
  if room <= 0 then return false end
  local values = redis.call('HMGET', prefix .. 'request:' .. request, unpack(ARGV, 5))
  if values[1] == 'queued' then -- its dead letter was put back: it will end again, and tell so
    done(queue, id)
    return true
  end

  local result, place, blob = prefix .. 'result:' .. request, 'none', ''
  local size = redis.pcall('STRLEN', result)
  if type(size) == 'table' then -- it refers to an object
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

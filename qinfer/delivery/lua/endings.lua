-- Takes ended requests from an outbox that a program named, each with its record and result: those that were taken long
-- enough ago and not confirmed, then new ones.
-- KEYS: outbox. ARGV: group, consumer, count, ms until what was not confirmed comes again (-1 = only new ones), what the
--   partition's keys begin with, how many bytes of results are passed on here, ms after which a consumer is gone, the
--   record's fields; the first is the state.
-- Returns {id, id of the request, deliveries, notes, values of the record's fields, result's place (none | given | apart),
--   result} per ending; where results are large, fewer than there are.
local outbox, prefix = KEYS[1], ARGV[5]
local group, consumer, left, retry = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local room, gone = tonumber(ARGV[6]), tonumber(ARGV[7])
local PAGE, BESIDES = 100, 500 -- so many bytes are the rest of an ending, about
local taken, largest = {}, nil

if redis.call('EXISTS', outbox) == 0 then return taken end
if redis.pcall('XPENDING', outbox, group).err then -- there is no group yet
  redis.call('XACK', outbox, group, '0-0') -- changes nothing, but is a write: after one, full memory stops no script
  redis.call('XGROUP', 'CREATE', outbox, group, '0')
end

local function take(id, deliveries, entry)
  local request, notes = entry[2][2], entry[2][4]
  local values = redis.call('HMGET', prefix .. 'request:' .. request, unpack(ARGV, 8))
  if values[1] == 'queued' then -- its dead letter was put back: it will end again, and tell so
    redis.call('XACK', outbox, group, id)
    redis.call('XDEL', outbox, id)
    return
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
  taken[#taken + 1] = {id, request, deliveries, notes, values, place, blob}
  size = size + BESIDES
  left, room, largest = left - 1, room - size, math.max(largest or 0, size)
end

local start = retry >= 0 and '-'
while start and left > 0 and room > 0 do
  local page = redis.call('XPENDING', outbox, group, 'IDLE', retry, start, '+', PAGE)
  for _, pending in ipairs(page) do
    local id = pending[1]
    local entry = redis.call('XCLAIM', outbox, group, consumer, 0, id)[1]
    if entry then
      take(id, pending[4] + 1, entry)
    else
      redis.call('XACK', outbox, group, id) -- its body is gone; 6.2 keeps such an id for ever
    end
    if left == 0 or room <= 0 then break end
  end
  start = #page == PAGE and '(' .. page[PAGE][1]
end

while left > 0 and room > 0 do
  local count = largest and math.max(1, math.min(left, math.floor(room / largest))) or 1
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', outbox, '>')
  if not reply then break end
  for _, entry in ipairs(reply[1][2]) do take(entry[1], 1, entry) end
end

forget_consumers(outbox, group, gone)
return taken

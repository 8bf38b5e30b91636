-- Takes up to `count` entries, lane by lane, shares in turn; of each stream first ready released entries, then
-- new entries.
-- KEYS: lanes by priority. ARGV: group, consumer, released, count (> 0).
-- Returns {lane's number, id, fields, deliveries, share} per entry, and {lane's number, share} per further stream.
local group, consumer, released, left = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local taken, divided = {}, {}

local function take(number, share, count)
  local before, waiting = #taken, share.waiting
  while #waiting > 0 and #taken - before < count do
    local pending = table.remove(waiting, 1)
    local entry = redis.call('XCLAIM', share.stream, group, consumer, 0, pending[1])[1]
    if entry then
      taken[#taken + 1] = {number, entry[1], entry[2], pending[4] + 1, share.number}
    else
      redis.call('XACK', share.stream, group, pending[1]) -- its body is gone; 6.2 keeps such an id for ever
    end
  end
  local room = count - (#taken - before)
  if room == 0 then return count end
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', room, 'STREAMS', share.stream, '>')
  for _, entry in ipairs(reply and reply[1][2] or {}) do
    taken[#taken + 1] = {number, entry[1], entry[2], 1, share.number}
  end
  return #taken - before
end

-- The shares of a lane with their leads. All lanes are asked first: a missing group raises NOGROUP before entries could
-- be lost with the reply.
local function look(number, lane)
  local shares, leads = {}, {}
  local streams = streams_of(lane)
  local known = #streams > 1 and redis.call('HGETALL', lane .. '~leads') or {}
  for i = 1, #known, 2 do leads[tonumber(known[i])] = tonumber(known[i + 1]) end
  for _, stream in ipairs(streams) do
    local share = {number = stream[1], stream = stream[2], weight = stream[3], lead = leads[stream[1]] or 0}
    if share.number > 0 then divided[#divided + 1] = {number, share.number} end
    share.empty = share.number > 0 and redis.call('XLEN', share.stream) == 0
    if not share.empty then
      share.waiting = redis.call('XPENDING', share.stream, group, 'IDLE', READY_MS, '-', '+', left, released)
    end
    shares[#shares + 1] = share
  end
  return shares
end

local lanes = {}
for number, lane in ipairs(KEYS) do lanes[number] = look(number, lane) end

for number, shares in ipairs(lanes) do
  if left == 0 then break end
  if #shares == 1 then
    left = left - take(number, shares[1], left)
  else
    local got = take_in_turn(shares, left, function(share, count) return take(number, share, count) end)
    left = left - got
    if got > 0 then
      local leads = {}
      for _, share in ipairs(shares) do
        leads[#leads + 1], leads[#leads + 2] = share.number, string.format('%.9f', share.lead)
      end
      redis.call('HSET', KEYS[number] .. '~leads', unpack(leads))
    end
  end
end
return {taken, divided}

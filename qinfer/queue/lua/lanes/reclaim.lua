-- Takes up to `count` entries, released suspects included, whose owner has been silent for `idle` ms; forgets dead
-- consumers and tenants.
-- KEYS: lanes. ARGV: group, consumer, released, suspects, count, idle (ms), ms until a consumer is dead. Returns
--   {lane's number, id, fields, deliveries, share} per entry.
local group, consumer, released, suspects, left = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local idle, gone = ARGV[6], tonumber(ARGV[7])
local PAGE = 100
local taken = {}

local function look(number, share, lane)
  local start = '-'
  while start and left > 0 do
    local page = redis.call('XPENDING', lane, group, 'IDLE', idle, start, '+', PAGE)
    for _, pending in ipairs(page) do
      -- Released entries are for `fetch`; a released suspect may rest.
      if left > 0 and pending[2] ~= released and (pending[2] ~= suspects or pending[3] >= READY_MS) then
        local entry = redis.call('XCLAIM', lane, group, consumer, idle, pending[1])[1]
        ended(lane, pending[1])
        if entry then
          taken[#taken + 1] = {number, entry[1], entry[2], pending[4] + 1, share}
          left = left - 1
        else
          redis.call('XACK', lane, group, pending[1]) -- its body is gone; XAUTOCLAIM of 6.2 leaves such an id
        end
      end
    end
    start = #page == PAGE and '(' .. page[PAGE][1]
  end

  for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', lane, group)) do
    local info = {}
    for i = 1, #fields, 2 do info[fields[i]] = fields[i + 1] end
    -- DELCONSUMER drops a consumer's entries
    if info.pending == 0 and info.idle > gone and info.name ~= released then
      redis.call('XGROUP', 'DELCONSUMER', lane, group, info.name)
    end
  end
end

-- A qinfer of another version may leave ownerless entries in the executing set.
local function forget_ended(lane)
  for _, id in ipairs(redis.call('SMEMBERS', lane .. EXECUTING)) do
    if not redis.call('XPENDING', lane, group, id, id, 1)[1] then ended(lane, id) end
  end
end

for number, lane in ipairs(KEYS) do
  for _, stream in ipairs(streams_of(lane)) do
    look(number, stream[1], stream[2])
    forget_ended(stream[2])
  end
  forget_tenants(lane)
end
return taken

-- Takes up to `count` entries whose owner has been silent for `idle` ms, suspects that were given back among them, and
-- forgets consumers and tenants that are long gone.
-- KEYS: the lanes. ARGV: group, consumer, consumers of what was released and of suspects, count, idle ms, ms after which a consumer is gone.
-- Returns {lane's number, id, fields, deliveries, share's number} per entry.
local group, consumer, released, suspects, left = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local idle, gone = ARGV[6], tonumber(ARGV[7])
local PAGE = 100
local taken = {}

local function look(number, share, lane)
  local start = '-'
  while start and left > 0 do
    local page = redis.call('XPENDING', lane, group, 'IDLE', idle, start, '+', PAGE)
    for _, pending in ipairs(page) do
      -- What was released waits for `fetch` and is no suspect; a suspect that was given back may have to rest.
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
    -- DELCONSUMER drops what a consumer still owns: only those that own nothing
    if info.pending == 0 and info.idle > gone and info.name ~= released then
      redis.call('XGROUP', 'DELCONSUMER', lane, group, info.name)
    end
  end
end

-- Takes out of the set of those that execute what is nobody's any more: a qinfer of another version may have removed it.
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

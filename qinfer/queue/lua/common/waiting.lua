-- Waiting entries; needs holder.lua and shares.lua.

-- Counts waiting entries: all but executing entries if workers report these (`is_told`), else all but held entries.
local function waiting(stream, group, is_told)
  local count = redis.call('XLEN', stream)
  if is_told then return count - redis.call('SCARD', stream .. EXECUTING) end
  local pending = redis.pcall('XPENDING', stream, group) -- without a group nothing is held
  for _, owned in ipairs(not pending.err and pending[4] or {}) do
    if not is_ownerless(owned[1]) then count = count - tonumber(owned[2]) end
  end
  return count
end

-- Counts undelivered entries, which alone wake blocking reads.
local function unread(stream, group)
  local pending = redis.pcall('XPENDING', stream, group)
  return redis.call('XLEN', stream) - (pending.err and 0 or tonumber(pending[1]))
end

-- Returns how many of `count` entries have room: until `limit` (0 = none) wait in a lane and its `.delayed` lane, and
--   at least the share's part of it: a tenant below its share is admitted even if the lane is full.
local function room(lane, number, delayed, limit, group, is_told, count)
  if limit == 0 then return count end
  local streams, held = streams_of(lane), redis.call('XLEN', delayed)
  for _, stream in ipairs(streams) do held = held + redis.call('XLEN', stream[2]) end
  if held + count <= limit then return count end

  local all, own, weight, weights = waiting(delayed, group, is_told), 0, 1, 0
  for _, stream in ipairs(streams) do
    local its = waiting(stream[2], group, is_told)
    all = all + its
    if stream[1] == number then own, weight = its, stream[3] end
    if stream[1] == number or its > 0 then weights = weights + stream[3] end
  end
  local let = 0
  while let < count and (all + let < limit or #streams > 1 and (own + let) * weights < limit * weight) do let = let + 1 end
  return let
end

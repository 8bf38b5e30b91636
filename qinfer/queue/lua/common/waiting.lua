-- Returns how many entries wait in a lane: all but those that a consumer holds.
local function waiting(lane, group, released, suspects)
  local count = redis.call('XLEN', lane)
  local pending = redis.pcall('XPENDING', lane, group) -- an error where there is no group yet: nothing is held
  for _, held in ipairs(not pending.err and pending[4] or {}) do
    if held[1] ~= released and held[1] ~= suspects then count = count - tonumber(held[2]) end
  end
  return count
end

-- Tells whether so many entries as `limit` (0 = none) wait in a lane and its lane for the delayed.
local function is_full(lane, delayed, limit, ...)
  if limit == 0 or redis.call('XLEN', lane) + redis.call('XLEN', delayed) < limit then return false end
  return waiting(lane, ...) + waiting(delayed, ...) >= limit
end

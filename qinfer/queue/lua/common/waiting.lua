-- Returns how many entries of a lane wait: all but those that execute.
local function waiting(lane, group)
  local count = redis.call('XLEN', lane)
  local pending = redis.pcall('XPENDING', lane, group) -- an error where there is no group yet: nothing is held
  for _, owned in ipairs(not pending.err and pending[4] or {}) do
    if is_executing(owned[1]) then count = count - tonumber(owned[2]) end
  end
  return count
end

-- Tells whether so many entries as `limit` (0 = none) wait in a lane and its lane for the delayed.
local function is_full(lane, delayed, limit, group)
  if limit == 0 or redis.call('XLEN', lane) + redis.call('XLEN', delayed) < limit then return false end
  return waiting(lane, group) + waiting(delayed, group) >= limit
end

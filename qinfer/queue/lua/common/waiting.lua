-- Returns how many entries of a lane wait: all but those that execute, where workers say which do (`is_told`); else all but
-- those that a worker holds.
local function waiting(lane, group, is_told)
  local count = redis.call('XLEN', lane)
  local pending = redis.pcall('XPENDING', lane, group) -- an error where there is no group yet: nothing is held
  for _, owned in ipairs(not pending.err and pending[4] or {}) do
    local is_out = is_executing(owned[1]) or not (is_told or is_ownerless(owned[1]))
    if is_out then count = count - tonumber(owned[2]) end
  end
  return count
end

-- Tells whether so many entries as `limit` (0 = none) wait in a lane and its lane for the delayed.
local function is_full(lane, delayed, limit, group, is_told)
  if limit == 0 or redis.call('XLEN', lane) + redis.call('XLEN', delayed) < limit then return false end
  return waiting(lane, group, is_told) + waiting(delayed, group, is_told) >= limit
end

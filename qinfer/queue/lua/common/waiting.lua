-- Returns how many entries wait in a lane: all but those that a consumer holds.
local function waiting(lane, group, released, suspects)
  local count = redis.call('XLEN', lane)
  local pending = redis.pcall('XPENDING', lane, group) -- an error where there is no group yet: nothing is held
  for _, held in ipairs(not pending.err and pending[4] or {}) do
    if held[1] ~= released and held[1] ~= suspects then count = count - tonumber(held[2]) end
  end
  return count
end

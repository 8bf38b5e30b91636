-- Takes items of a kind. KEYS: its queue. ARGV: count, pause in ms, longest pause in ms.
-- Returns {id, attempts, item, notes} of each.
local taken = {}

take(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), function(...)
  taken[#taken + 1] = {...}
  return true
end)
return taken

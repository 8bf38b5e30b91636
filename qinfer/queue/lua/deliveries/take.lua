-- Takes items. KEYS: queue. ARGV: count, pause, longest pause (ms). Returns {id, attempts, item, notes} of each.
local taken = {}

take(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), function(...)
  taken[#taken + 1] = {...}
  return true
end)
return taken

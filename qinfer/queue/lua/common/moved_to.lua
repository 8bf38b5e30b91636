-- Returns where an entry is that was moved to the lane of another version (`move.lua`): its place, which is the lane without what the
-- partition's keys begin with, and its id; nil where it was not. `notes`: of the partition.
local function moved_to(notes, place, id)
  local to = redis.call('HGET', notes, place .. ':' .. id)
  if to then return string.match(to, '^(.*):([^:]*)$') end
end

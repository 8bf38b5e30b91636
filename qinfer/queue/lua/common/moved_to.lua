-- Returns the place (the lane without prefix) and id of an entry that `move.lua` moved, or nil; `notes` are the
-- partition's.
local function moved_to(notes, place, id)
  local to = redis.call('HGET', notes, place .. ':' .. id)
  if to then return string.match(to, '^(.*):([^:]*)$') end
end

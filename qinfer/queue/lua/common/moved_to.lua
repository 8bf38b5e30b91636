-- Returns the place (lane without prefix) and id of a moved entry, or nil; `notes` are those of the partition.
local function moved_to(notes, place, id)
  local to = redis.call('HGET', notes, place .. ':' .. id)
  if to then return string.match(to, '^(.*):([^:]*)$') end
end

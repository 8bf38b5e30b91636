-- Notes of a partition about entries; a `place` is a lane without prefix.

-- Returns the place and id of a moved entry, or nil.
local function moved_to(notes, place, id)
  local to = redis.call('HGET', notes, place .. ':' .. id)
  if to then return string.match(to, '^(.*):([^:]*)$') end
end

-- Notes cancelled entries for their workers (`StreamMarks.list_cancelled`): a thousand, for an hour.
local function note_cancel(notes, place, entries)
  for _, id in ipairs(entries) do redis.call('XADD', notes, 'MAXLEN', '~', 1000, '*', 'e', place .. ':' .. id) end
  if #entries > 0 then redis.call('PEXPIRE', notes, 3600000) end
end

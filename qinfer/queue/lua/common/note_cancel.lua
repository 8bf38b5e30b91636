-- Notes cancelled entries for their workers (`StreamMarks.list_cancelled`): a thousand, for an hour. `place` is the lane
-- without prefix.
local function note_cancel(notes, place, entries)
  for _, id in ipairs(entries) do redis.call('XADD', notes, 'MAXLEN', '~', 1000, '*', 'e', place .. ':' .. id) end
  if #entries > 0 then redis.call('PEXPIRE', notes, 3600000) end
end

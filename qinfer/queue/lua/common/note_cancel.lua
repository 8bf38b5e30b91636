-- Notes entries of a lane that were cancelled after they were delivered: whoever holds them reads it (`StreamMarks.cancelled`).
-- `place` is the lane without what the partition's keys begin with. The last thousand are kept, for an hour.
local function note_cancel(notes, place, entries)
  for _, id in ipairs(entries) do redis.call('XADD', notes, 'MAXLEN', '~', 1000, '*', 'e', place .. ':' .. id) end
  if #entries > 0 then redis.call('PEXPIRE', notes, 3600000) end
end

-- Appends the end of a request to an outbox that a program named, and returns the entry's id.
-- Without its request's record an end can't be told: what is older than that is dropped, and where no request ends any more
-- nothing is left.
local function tell(outbox, id, notes, kept, now)
  local oldest = string.format('%.0f', now - kept)
  local notice = redis.call('XADD', outbox, 'MINID', '~', oldest, '*', 'r', id, 'n', notes)
  if redis.call('PTTL', outbox) < kept then redis.call('PEXPIRE', outbox, kept) end
  return notice
end

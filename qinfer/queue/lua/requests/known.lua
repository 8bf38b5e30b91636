-- Finds an accepted request by idempotency key (may be nil) or id; returns its id and body hash. If it has ended with
-- the same body, its end goes to its outbox again, unless it waits there: with `notes`, or if nil the old ones.
local DAY_MS = 86400000
local function known(record, key, id, body_hash, notes)
  local prefix = string.sub(record, 1, -#('request:' .. id) - 1)
  local entry = key and redis.call('GET', key)
  local hash
  if entry then
    local cut = string.find(entry, '\n', 1, true)
    id, hash = string.sub(entry, 1, cut - 1), string.sub(entry, cut + 1)
    record = prefix .. 'request:' .. id
  else
    hash = redis.call('HGET', record, 'body_hash')
  end
  if not hash then return end
  if hash ~= body_hash then return id, hash end

  local of = redis.call('HMGET', record, 'state', 'outbox', 'notice', 'notes', 'result_ttl_ms', 'tombstone_ttl_ms')
  if not of[2] or of[1] == 'queued' then return id, hash end
  redis.call('UNLINK', record .. '|') -- for full memory
  local outbox, kept = prefix .. 'deliveries:outbox:' .. of[2], of[5] + of[6] + DAY_MS
  if notes and notes ~= of[4] then
    deliver(outbox, id, notes, kept, kept)
  elseif not of[3] or #redis.call('XRANGE', outbox, of[3], of[3]) == 0 then
    redis.call('HSET', record, 'notice', deliver(outbox, id, of[4], kept, kept))
  end
  return id, hash
end

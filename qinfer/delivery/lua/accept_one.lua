-- Accepts an asynchronous request: stores its record, its payload and its deadline, and appends it to its lane.
-- KEYS: lane, its lane for the delayed, record, due, payload, payload as it was staged, idempotency key.
-- ARGV: group, consumer of what was released, of suspects, id, frame, payload's place (none | given | staged), payload,
--   limit (0 = none, -1 = nothing new), ms: timeout, result's time to live, tombstone's, margin, idempotency key's (0 = there is no key),
--   body hash, the record's further fields and values.
-- Returns {what, id, body hash, names of objects that nothing refers to now}: what is new | known | full | gone (the staged
--   payload).
local function one(KEYS, ARGV)
local DAY_MS = 86400000
local lane, delayed, record, due, payload, staged, key = unpack(KEYS)
local group, released, suspects, id, frame, place, body = unpack(ARGV, 1, 7)
local limit, timeout, result_ttl, tombstone_ttl, margin, key_ttl, body_hash = unpack(ARGV, 8, 14)

local function refuse(what, known_id, known_hash)
  local objects = {}
  drop(staged, objects)
  return {what, known_id or id, known_hash or '', objects}
end

local known_id, known_hash
if key_ttl ~= '0' then
  local known = redis.call('GET', key)
  local cut = known and string.find(known, '\n', 1, true)
  if known then known_id, known_hash = string.sub(known, 1, cut - 1), string.sub(known, cut + 1) end
end
if not known_id then
  known_hash = redis.call('HGET', record, 'body_hash')
  known_id = known_hash and id
end
if known_id then
  -- A repetition changes nothing; the end of a request that has one is told again in its outbox, unless it waits there.
  local answer = refuse('known', known_id, known_hash) -- a write: after one, full memory stops no script
  if known_hash ~= body_hash then return answer end
  local prefix = string.sub(record, 1, -#('request:' .. id) - 1)
  local known_record = prefix .. 'request:' .. known_id
  local known = redis.call('HMGET', known_record, 'state', 'outbox', 'notice', 'notes', 'result_ttl_ms', 'tombstone_ttl_ms')
  if not known[2] or known[1] == 'queued' then return answer end

  local outbox, kept, notes = prefix .. 'outbox:' .. known[2], known[5] + known[6] + DAY_MS, known[4]
  for i = 15, #ARGV, 2 do
    if ARGV[i] == 'notes' then notes = ARGV[i + 1] end
  end
  if notes ~= known[4] then
    tell(outbox, known_id, notes, kept, now_ms())
  elseif not known[3] or #redis.call('XRANGE', outbox, known[3], known[3]) == 0 then
    redis.call('HSET', known_record, 'notice', tell(outbox, known_id, notes, kept, now_ms()))
  end
  return answer
end

limit = tonumber(limit)
if limit < 0 then return refuse('full') end
if limit > 0 and redis.call('XLEN', lane) + redis.call('XLEN', delayed) >= limit then
  local count = waiting(lane, group, released, suspects) + waiting(delayed, group, released, suspects)
  if count >= limit then return refuse('full') end
end

-- Where memory is full the first of these writes raises, and nothing is stored.
local lifetime = timeout + result_ttl + tombstone_ttl + margin
local fields = {'f', frame}
if place == 'staged' then
  if redis.call('EXISTS', staged) == 0 then return refuse('gone') end
  redis.call('RENAME', staged, payload)
  redis.call('PEXPIRE', payload, lifetime)
elseif place == 'given' then
  redis.call('SET', payload, body, 'PX', lifetime)
end
if place ~= 'none' then
  fields[3], fields[4] = 'p', id
end

local entry = redis.call('XADD', lane, '*', unpack(fields))
local created = now_ms()
redis.call('HSET', record, 'state', 'queued', 'entry', entry, 'body_hash', body_hash, 'created_at', created,
  'deadline_at', created + timeout, 'timeout_ms', timeout, 'result_ttl_ms', result_ttl,
  'tombstone_ttl_ms', tombstone_ttl, unpack(ARGV, 15))
redis.call('PEXPIRE', record, lifetime)
redis.call('ZADD', due, created + timeout, id)
if key_ttl ~= '0' then redis.call('SET', key, id .. '\n' .. body_hash, 'PX', key_ttl) end
return {'new', id, body_hash, {}}
end

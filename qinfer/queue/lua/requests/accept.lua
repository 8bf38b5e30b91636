-- Accepts an asynchronous request: stores its record, payload and deadline, and appends it to its lane.
-- KEYS: lane, its `.delayed` lane, record, due, payload, staged payload, idempotency key.
-- ARGV: group, id, frame, place of the payload (none | given | staged), payload, limit (0 = none), is_told, timeout,
--   result_ttl, tombstone_ttl, margin, key_ttl (all ms, 0 = no key), body_hash, version, name, accepted, webhook,
--   outbox, notes, watcher, tenant, weight (0 = unknown), endpoint, share, room for files. Absent values are ''.
-- Returns {what, id, body hash, unreferenced objects}: new | known | full | gone (the staged payload) | over (the
--   tenant has stored too much).
local function one(KEYS, ARGV)
local lane, delayed, record, due, payload, staged, key = unpack(KEYS)
local group, id, frame, place, body = unpack(ARGV, 1, 5)
local limit, is_told = tonumber(ARGV[6]), ARGV[7] == '1'
local timeout, result_ttl, tombstone_ttl, margin, key_ttl, body_hash = unpack(ARGV, 8, 13)
local version, name, accepted, webhook, outbox, notes, watcher, tenant, weight, endpoint, share, free = unpack(ARGV, 14)
free = tonumber(free)

local function refuse(what, known_id, known_hash)
  local objects = {}
  drop(staged, objects)
  return {what, known_id or id, known_hash or '', objects}
end

local known_id, known_hash = known(record, key_ttl ~= '0' and key, id, body_hash, outbox ~= '' and notes or nil)
if known_id then return refuse('known', known_id, known_hash) end -- a repetition changes nothing
local prefix = string.sub(record, 1, -#('request:' .. id) - 1)
if share ~= '' and (is_over(prefix, share, 0) or free and is_over(prefix .. FILES, share, 0, free)) then
  forget_expired(prefix, share)
  forget_expired(prefix .. FILES, share)
  return refuse('over')
end
local route = route_of(lane, group, tenant, tonumber(weight))
if room(lane, route.share, delayed, limit, group, is_told, 1) == 0 then return refuse('full') end

-- With full memory the first write raises, and nothing is stored.
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
mark_origin(fields, endpoint, tenant, id)
if route.is_marked then fields[#fields + 1], fields[#fields + 2] = 'd', '1' end

local entry = redis.call('XADD', route.stream, '*', unpack(fields))
name = stream_of(name, route.number)
local created = now_ms()
redis.call('HSET', record, 'state', 'queued', 'entry', entry, 'version', version, 'lane', name, 'accepted', accepted,
  'webhook', webhook, 'body_hash', body_hash, 'created_at', created, 'deadline_at', created + timeout,
  'timeout_ms', timeout, 'result_ttl_ms', result_ttl, 'tombstone_ttl_ms', tombstone_ttl)
if outbox ~= '' then redis.call('HSET', record, 'outbox', outbox, 'notes', notes) end
if share ~= '' then
  redis.call('HSET', record, 'share', share)
  forget_expired(prefix, share)
  forget_expired(prefix .. FILES, share)
end
if watcher ~= '' then redis.call('HSET', record, 'waiters', watcher) end
redis.call('PEXPIRE', record, lifetime)
redis.call('ZADD', due, created + timeout, id)
if key_ttl ~= '0' then redis.call('SET', key, id .. '\n' .. body_hash, 'PX', key_ttl) end
return {'new', id, body_hash, {}}
end

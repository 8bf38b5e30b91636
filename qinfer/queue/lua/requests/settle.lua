-- Ends an asynchronous request once, and removes its entry in any case.
-- KEYS: record, result, staged result, due, webhooks, payload, responses, cancels.
-- ARGV: prefix, group, id, lane and entry ('' = as in the record), place of the result (none | given | staged), result,
--   attempt (0 = not executed), state, failure ('' = none), room for files ('' = not counted), execution ('' = none).
-- Returns {what, watchers by line, unreferenced objects}: first | late | gone (the staged result: nothing was done) |
--   over (the tenant has stored too much: it has not ended).
local function one(KEYS, ARGV)
local DAY_MS = 86400000
local record, result, staged, due, webhooks, payload, responses, notes = unpack(KEYS)
local prefix, group, id, given_lane, given_entry, place, blob, attempt, state, failure, free, execution = unpack(ARGV)

local known = redis.call('HMGET', record, 'state', 'version', 'lane', 'entry', 'webhook', 'waiters', 'outbox',
  'result_ttl_ms', 'tombstone_ttl_ms', 'notes', 'share', 'stored_bytes')
local is_first = known[1] == 'queued'
local lane, entry = is_first and prefix .. known[2] .. ':' .. known[3], known[4]
if is_first and place == 'staged' and redis.call('EXISTS', staged) == 0 then return {'gone', '', {}} end
local share, size, in_file = is_first and known[11], #blob, 0
free = tonumber(free)
if place == 'staged' then
  local is_object = redis.call('TYPE', staged).ok == 'hash'
  size = is_object and 0 or redis.call('STRLEN', staged)
  if is_object and free then in_file = tonumber(redis.call('HGET', staged, 'size')) end
end
local function lacks_room()
  return is_over(prefix, share, size) or in_file > 0 and is_over(prefix .. FILES, share, in_file, free)
end
if share and state == 'succeeded' and lacks_room() then
  local objects = {}
  drop(staged, objects)
  return {'over', '', objects}
end
if is_first and attempt == '0' then
  local pending = redis.pcall('XPENDING', lane, group, entry, entry, 1)
  if pending[1] then attempt = pending[1][4] end
end

local pending = is_first and state == 'cancelled' and redis.pcall('XPENDING', lane, group, entry, entry, 1)

-- Freeing writes go first, for full memory.
local function remove(from, entry_id)
  redis.call('XACK', from, group, entry_id)
  redis.call('XDEL', from, entry_id)
  ended(from, entry_id)
end
if given_entry ~= '' then remove(given_lane, given_entry) end
if is_first and (entry ~= given_entry or lane ~= given_lane) then remove(lane, entry) end -- it was moved meanwhile
local objects = {}
if redis.call('EXISTS', payload) == 1 then drop(payload, objects) end
redis.call('ZREM', due, id)
if not is_first then
  drop(staged, objects)
  return {'late', '', objects}
end

if pending and pending[1] then note_cancel(notes, string.sub(lane, #prefix + 1), {entry}) end
local result_ttl, lifetime, now = known[8], known[8] + known[9], now_ms()
local fields = {'finished_at', now, 'expires_at', now + result_ttl, 'attempts', attempt, 'state', state,
  'failure', failure}
if execution ~= '' then fields[#fields + 1], fields[#fields + 2] = 'execution', execution end
if known[7] then
  local kept = lifetime + DAY_MS
  local notice = deliver(prefix .. 'deliveries:outbox:' .. known[7], id, known[10], kept, kept)
  fields[#fields + 1], fields[#fields + 2] = 'notice', notice
end
redis.call('HSET', record, unpack(fields))
if known[6] then redis.call('HDEL', record, 'waiters') end
redis.call('PEXPIRE', record, lifetime)
redis.call('PEXPIRE', responses, result_ttl)
local index = prefix .. 'ended:' .. state
redis.call('ZREMRANGEBYSCORE', index, '-inf', now) -- their records have expired
redis.call('ZADD', index, now + lifetime, id)
redis.call('PEXPIRE', index, math.max(redis.call('PTTL', index), lifetime))
if place == 'staged' then
  redis.call('RENAME', staged, result)
  redis.call('PEXPIRE', result, result_ttl)
elseif place == 'given' then
  redis.call('SET', result, blob, 'PX', result_ttl)
end
if share then
  note_stored(prefix, share, id, size + (tonumber(known[12]) or 0), now + result_ttl)
  if in_file > 0 then note_stored(prefix .. FILES, share, id, in_file, now + result_ttl) end
end
if not known[7] and known[5] and known[5] ~= '' then
  redis.call('HSET', record, 'webhook_state', 'pending')
  -- It expires with the record, in case webhooks are switched off.
  deliver(webhooks, 'request:' .. id, '', lifetime + DAY_MS)
end
return {'first', known[6] or '', objects}
end

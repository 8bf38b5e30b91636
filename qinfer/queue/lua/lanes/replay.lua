-- Moves a dead letter to the end of its lane, as never delivered; an asynchronous request is `queued` again.
-- KEYS: letters, lane, payload, record, result, due, responses, operation that counts it (optional). ARGV: id, request,
--   ttl (ms, of the payload), name of the lane, margin (ms, of the record), and for an object version, copy and size.
-- Returns {entry id, unreferenced objects}, or nil.
local letters, lane, payload, record, result, due, responses, operation = unpack(KEYS)
local id, request, ttl, name, margin, version, copy, size = unpack(ARGV)

local letter = redis.call('XRANGE', letters, id, id)[1]
if not letter then return false end
local body = {}
for f = 1, #letter[2], 2 do body[letter[2][f]] = letter[2][f + 1] end

local times = redis.call('HMGET', record, 'timeout_ms', 'result_ttl_ms', 'tombstone_ttl_ms')
if times[1] then ttl = times[1] + times[2] + times[3] + margin end
local fields = {'f', body.frame}
if body.object then
  if redis.call('EXISTS', payload) == 1 then redis.call('UNLINK', payload) end
  redis.call('HSET', payload, 'v', version, 'name', copy, 'size', size)
  redis.call('PEXPIRE', payload, ttl)
elseif body.payload ~= '' then
  redis.call('SET', payload, body.payload, 'PX', ttl)
end
if body.object or body.payload ~= '' then
  fields[#fields + 1] = 'p'
  fields[#fields + 1] = request
end
local entry = redis.call('XADD', lane, '*', unpack(fields))
redis.call('XDEL', letters, id)
count_changed(operation, 1)
local gone = {body.object}

if times[1] then
  local deadline = now_ms() + times[1]
  redis.call('HSET', record, 'state', 'queued', 'lane', name, 'entry', entry, 'deadline_at', deadline)
  redis.call('HDEL', record, 'failure', 'attempts', 'finished_at', 'expires_at', 'webhook_state', 'notice',
    'stored_by', 'stored_bytes', 'execution')
  redis.call('PEXPIRE', record, ttl)
  drop(result, gone)
  redis.call('UNLINK', responses)
  redis.call('ZADD', due, deadline, request)
end
return {entry, gone}

-- Removes the result of an asynchronous request that has ended, and its responses; its record and its idempotency key stay. One
-- whose end goes to an outbox keeps them for that.
-- KEYS: record, result, responses. ARGV: what the partition's keys begin with, id. Returns the names of objects that nothing refers to now.
local record, result, responses = unpack(KEYS)
local state, outbox, share = unpack(redis.call('HMGET', record, 'state', 'outbox', 'share'))
if not state or state == 'queued' or outbox then return {} end

-- What frees memory comes first: after a write Redis lets a script go on, however full its memory is.
local objects = {}
drop(result, objects)
redis.call('UNLINK', responses)
if share then note_stored(ARGV[1], share, ARGV[2], 0) end
if state == 'succeeded' then redis.call('HSET', record, 'expires_at', now_ms()) end
return objects

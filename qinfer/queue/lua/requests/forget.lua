-- Removes an ended request's result and responses, unless its end goes to an outbox; its record stays.
-- KEYS: record, result, responses. ARGV: prefix, id. Returns unreferenced objects.
local record, result, responses = unpack(KEYS)
local state, outbox, share = unpack(redis.call('HMGET', record, 'state', 'outbox', 'share'))
if not state or state == 'queued' or outbox then return {} end

-- Freeing writes go first, for full memory.
local objects = {}
drop(result, objects)
redis.call('UNLINK', responses)
if share then note_removed(ARGV[1], share, ARGV[2]) end
if state == 'succeeded' then redis.call('HSET', record, 'expires_at', now_ms()) end
return objects

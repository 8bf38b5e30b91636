-- Removes an ended request's result and responses, unless its end goes to an outbox; its record stays.
-- KEYS: record, result, responses, operation that counts it (optional). ARGV: prefix, id. Returns unreferenced objects.
local record, result, responses, operation = unpack(KEYS)
local state, outbox, share = unpack(redis.call('HMGET', record, 'state', 'outbox', 'share'))
if not state or state == 'queued' or outbox then return {} end

-- Freeing writes go first, for full memory.
local objects, has_any = {}, redis.call('EXISTS', result, responses) > 0
drop(result, objects)
redis.call('UNLINK', responses)
if has_any then count_changed(operation, 1) end
if share then note_removed(ARGV[1], share, ARGV[2]) end
if state == 'succeeded' then redis.call('HSET', record, 'expires_at', now_ms()) end
return objects

-- Removes a notice, and notes what became of it in the record of its request or job.
-- KEYS: outbox, record. ARGV: group, the notice's id, delivered | failed.
local outbox, record = unpack(KEYS)

redis.call('XACK', outbox, ARGV[1], ARGV[2])
redis.call('XDEL', outbox, ARGV[2])
if redis.call('EXISTS', record) == 1 then redis.call('HSET', record, 'webhook_state', ARGV[3]) end
return 1

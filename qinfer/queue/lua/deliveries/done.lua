-- Removes items, and notes in a record what became of them. KEYS: the queue, the record (none = nothing is noted).
-- ARGV: the record's field, its value, ids.
done(KEYS[1], unpack(ARGV, 3))
if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end

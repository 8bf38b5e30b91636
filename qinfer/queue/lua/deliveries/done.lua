-- Removes items, and sets a field of an existing record. KEYS: queue, record (optional). ARGV: field, value, ids.
done(KEYS[1], unpack(ARGV, 3))
if KEYS[2] and redis.call('EXISTS', KEYS[2]) == 1 then redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end

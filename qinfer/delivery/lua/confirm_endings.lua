-- Removes what was told from an outbox that a program named.
-- KEYS: outbox. ARGV: group, ids.
redis.call('XACK', KEYS[1], ARGV[1], unpack(ARGV, 2))
return redis.call('XDEL', KEYS[1], unpack(ARGV, 2))

-- Rings for a lane. KEYS: doorbell. ARGV: common prefix of the version's lanes, rings to keep, for how many ms.
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- for full memory
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'l', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])

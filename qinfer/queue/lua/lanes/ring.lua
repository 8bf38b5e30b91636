-- Rings for a lane: workers that sleep before it look again.
-- KEYS: the doorbell. ARGV: what the lane's version has in common, how many rings to keep, ms to keep them.
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- a write: after one, full memory stops no script
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'l', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])

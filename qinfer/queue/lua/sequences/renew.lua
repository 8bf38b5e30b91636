-- Begins or renews a worker's lease on its sequences.
-- KEYS: the owners, the orphaned sequences, the worker's lanes. ARGV: worker, lease in ms, whether it begins (1).
-- Returns 1, or 0 if the lease has ended, or can't begin until orphaned sequences are handed over.
-- The lanes outlive the lease by a day, as they may have the only copy of a step.
redis.call('ZREM', KEYS[1], '') -- for full memory
local lane_ms = 4 * ARGV[2] + 86400000
local is_new = ARGV[3] == '1'
if is_new and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
if not is_new and not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], string.format('%.0f', now_ms() + ARGV[2]), ARGV[1])
for i = 3, #KEYS do redis.call('PEXPIRE', KEYS[i], lane_ms) end
return 1

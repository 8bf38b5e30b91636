-- Adds a gateway's counts of a trial, and latencies of its stable target.
-- KEYS: counts, latencies. ARGV: ms to keep, latencies to keep, number of counts, field and count of each, latencies.
local keep_ms, most, counts = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
for i = 4, 2 + 2 * counts, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
if counts > 0 then redis.call('PEXPIRE', KEYS[1], keep_ms) end
for i = 4 + 2 * counts, #ARGV do redis.call('LPUSH', KEYS[2], ARGV[i]) end
if #ARGV > 3 + 2 * counts then
  redis.call('LTRIM', KEYS[2], 0, most - 1)
  redis.call('PEXPIRE', KEYS[2], keep_ms)
end

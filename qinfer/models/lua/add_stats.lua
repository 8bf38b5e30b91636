-- Adds to the statistics of a model version; of the first fields the greatest value stays, instead of the sum.
-- KEYS: stats. ARGV: how many fields keep the greatest value, then field and value of each.
local latest = tonumber(ARGV[1])
for i = 2, #ARGV, 2 do
  if i > 1 + 2 * latest then
    redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
  elseif tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0') < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end

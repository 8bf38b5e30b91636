-- Stores a configuration and returns 1, unless the same or a newer generation is stored.
-- KEYS: config. ARGV: generation, document.
local current = tonumber(redis.call('HGET', KEYS[1], 'generation') or '-1')
if current >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'generation', ARGV[1], 'model', ARGV[2])
return 1

-- Writes the desired state of a model, unless a newer generation is stored.
-- KEYS: desired. ARGV: model, generation, document.
local current = redis.call('HGET', KEYS[1], ARGV[1])
if current and cjson.decode(current).generation > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1

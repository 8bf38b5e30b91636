-- Adds to statistics; resets a key that is no hash, and a field that is no number.
-- KEYS: stats. ARGV: number of fields that keep the greatest value (the first ones); field and value of each.
local latest = tonumber(ARGV[1])
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
for i = 2, #ARGV, 2 do
  if i <= 1 + 2 * latest then
    local known = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0') or 0
    if known < tonumber(ARGV[i + 1]) then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
  else
    local reply = redis.pcall('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
    if type(reply) == 'table' then
      if not (string.find(reply.err, 'not an integer') or string.find(reply.err, 'overflow')) then return reply end
      redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    end
  end
end

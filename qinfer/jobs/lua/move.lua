-- Changes a job's state if expected; running to finalizing only if no shard is left.
-- KEYS: as in job.lua. ARGV: id, new state, number of expected states, these, fields and values. Returns 1 or 0.
local id, state, expected = ARGV[1], ARGV[2], tonumber(ARGV[3])

local was = redis.call('HGET', KEYS[1], 'state')
if was == 'running' and state == 'finalizing' and redis.call('ZCARD', KEYS[2]) + redis.call('HLEN', KEYS[3]) > 0 then return 0 end
for i = 4, math.min(3 + expected, #ARGV) do
  if was == ARGV[i] then
    become(id, state, unpack(ARGV, 4 + expected))
    return 1
  end
end
return 0

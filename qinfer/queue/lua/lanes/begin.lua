-- Takes note that entries which `worker` owns begin to execute: they wait no longer.
-- KEYS: the lane. ARGV: group, worker, entry ids. Returns how many began.
local lane, group, worker = KEYS[1], ARGV[1], ARGV[2]
local count = 0

for i = 3, #ARGV do
  local pending = held(lane, group, worker, ARGV[i])
  if pending and pending[2] == worker then
    redis.call('XCLAIM', lane, group, worker .. EXECUTING, 0, ARGV[i], 'JUSTID') -- JUSTID: the delivery count stays
    count = count + 1
  end
end
return count

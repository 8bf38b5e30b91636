-- Offers sequences of workers whose lease has ended, and closes these workers' lanes.
-- KEYS: the owners, the orphaned sequences, the lanes with steps. ARGV: prefix, is_fragile, count. Returns {how many, unreferenced objects}.
begin(ARGV[1], ARGV[2])
make_room()
local owners, orphans = KEYS[1], KEYS[2]
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', owners, '-inf', now, 'LIMIT', 0, 10)) do
  local owned = prefix .. 'sequence-owned:' .. worker
  redis.call('SUNIONSTORE', orphans, orphans, owned)
  redis.call('UNLINK', owned)
  redis.call('ZREM', owners, worker)
end
for _, lane in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  local worker = string.match(lane, ':seq@(.+)$')
  if not (worker and redis.call('ZSCORE', owners, worker)) then close_lane(lane) end
end

local reaped, all = 0, {}
for _, name in ipairs(redis.call('SPOP', orphans, ARGV[3])) do
  local of = load(name)
  if of and of.state == 'open' and of.owner ~= '' and not redis.call('ZSCORE', owners, of.owner) then
    for _, object in ipairs(hand_over(of, true)) do all[#all + 1] = object end
    reaped = reaped + 1
  end
end
return {reaped, all}

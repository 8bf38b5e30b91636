-- Offers sequences of workers whose lease has ended.
-- KEYS: the owners, the orphaned sequences. ARGV: prefix, is_fragile, count. Returns {how many, unreferenced objects}.
begin(ARGV[1], ARGV[2])
make_room()
local owners, orphans = KEYS[1], KEYS[2]
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', owners, '-inf', now, 'LIMIT', 0, 10)) do
  local owned = prefix .. 'sequence-owned:' .. worker
  redis.call('SUNIONSTORE', orphans, orphans, owned)
  redis.call('UNLINK', owned)
  redis.call('ZREM', owners, worker)
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

-- Ends sequences without an owner at the deadline of a waiting step, or after a time without one.
-- KEYS: the open sequences. ARGV: prefix, is_fragile, how many to look at. Returns {how many ended, unreferenced
--   objects}.
begin(ARGV[1], ARGV[2])
make_room()
local ended, all = 0, {}

local function end_unowned(of)
  local first
  each_step(of.name, function(_, step)
    if tonumber(step.l) == of.life then first = math.min(first or tonumber(step.d), tonumber(step.d)) end
  end)
  if first and first <= now then
    ended = ended + 1
    return fail(of, 'deadline_exceeded', 'timeout of the corresponding sequence has been expired', of.committed + 1)
  end
  local due = first or of.used + math.max(of.idle, LOOK_MS)
  if due <= now then
    ended = ended + 1
    return over(of, GRACE_MS)
  end
  redis.call('ZADD', KEYS[1], math.min(due, now + LOOK_MS), of.name)
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local of = load(name)
  if not of or of.state ~= 'open' then
    close(name)
  elseif of.owner ~= '' and redis.call('ZSCORE', prefix .. 'sequence-owners', of.owner) then
    redis.call('ZADD', KEYS[1], now + LOOK_MS, name)
    if is_direct(of) then keep(of, of.idle + DAY_MS) end -- whose steps do not
  else
    local gone = of.owner == '' and end_unowned(of) or of.owner ~= '' and hand_over(of, true)
    for _, object in ipairs(gone or {}) do all[#all + 1] = object end
  end
end
-- Earlier versions leave ended sequences in the tenants' sets.
for _, tenant in ipairs(redis.call('HKEYS', KEYS[1] .. '~')) do
  for _, name in ipairs(redis.call('SRANDMEMBER', KEYS[1] .. '~' .. tenant, 10)) do
    if not redis.call('ZSCORE', KEYS[1], name) then close(name) end
  end
  if redis.call('EXISTS', KEYS[1] .. '~' .. tenant) == 0 then redis.call('HDEL', KEYS[1] .. '~', tenant) end
end
return {ended, all}

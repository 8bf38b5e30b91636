-- Gives a worker waiting sequences and tells it their steps; next is the tenant with the fewest held by weight,
-- handed-over ones first.
-- KEYS: lanes of waiting sequences by priority, the worker's lane. ARGV: prefix, is_fragile, worker, count, bits (0 =
--   text, '' = the model gets no ids).
-- Returns {whether the lease is alive, {name, life, token, committed, generation, kind, idle ms, is_other, number (0 =
--   none), deaths, committed entries and their numbers} of each, era, closed lanes in which their steps may be}.
local MOST_TICKETS = 100 -- to look at, as some sequences have ended
begin(ARGV[1], ARGV[2])
make_room()
local worker, left, bits = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local owned, closed = {}, {}
if tonumber(redis.call('ZSCORE', prefix .. 'sequence-owners', worker) or 0) <= now then return {0, {}, era, {}} end

-- Returns the committed entries that may be unanswered. An earlier version's owner has committed by the record's numbers.
local function done_of(of)
  local done = {}
  if of.committed == 0 then return done end
  local was_direct = of.direct == of.token
  for _, field in ipairs(redis.call('HKEYS', record_of(of.name))) do
    local entry = string.match(field, '^done:(.+)$')
    local life, n = string.match(entry and redis.call('HGET', record_of(of.name), field) or '', '^(%d+)%.(%d+)$')
    if tonumber(life) == of.life then done[#done + 1], done[#done + 2] = entry, tonumber(n) end
  end
  each_step(of.name, function(id, step)
    local n = tonumber(step.n)
    if not was_direct and tonumber(step.l) == of.life and n <= of.committed then
      done[#done + 1], done[#done + 2] = 'steps/' .. id, n
    end
  end)
  return done
end

local function take(of)
  local done = done_of(of)
  local other, number = false, of.number
  if bits then other, number = tell_apart(of.name, number, bits, math.max(of.kept - now, TOMBSTONE_MS)) end
  write(of, {number = number, owner = worker, token = of.token + 1, direct = of.token + 1, ticket = '', used = now})
  if redis.call('SADD', prefix .. 'sequence-lanes', of.version .. ':seq@' .. worker) == 1 then
    redis.call('XADD', KEYS[#KEYS], '*', 's', '') -- gateways append to a lane that exists
    redis.call('PEXPIRE', KEYS[#KEYS], DAY_MS)
  end
  if of.kind ~= 'explicit' and of.token > 1 and #closed == 0 then closed = redis.call('SMEMBERS', prefix .. 'sequence-closed') end
  redis.call('SADD', prefix .. 'sequence-owned:' .. worker, of.name)
  redis.call('ZADD', prefix .. 'sequences', now + LOOK_MS, of.name)
  each_step(of.name, function(id, step)
    if tonumber(step.l) == of.life then
      local n = tonumber(step.n)
      local deaths = math.min(of.deaths, of.token - 1 - (tonumber(step.o) or 0))
      tell(of, id, of.life, n, n == of.committed + 1 and deaths + 1 or 1, n > of.committed and step.f, step.p or '')
    end
  end)
  if of.tail > of.life then tell_restart(of) end
  owned[#owned + 1] = {of.name, of.life, of.token, of.committed, of.generation, of.kind, string.format('%.0f', of.idle),
    other and 1 or 0, number, of.deaths, done}
  left = left - 1
end

local lanes = {unpack(KEYS, 1, #KEYS - 1)}
local shares = shares_of(lanes)
for _ = 1, MOST_TICKETS do
  local share = left > 0 and next_of(shares)
  if not share then break end
  redis.call('XDEL', share.stream, share.id)
  local of = load(share.name)
  if of and of.state == 'open' and prefix .. of.version .. ':' .. of.ticket == share.stream .. ' ' .. share.id then
    take(of)
    share.held = share.held + 1
  end
  share.since = look(share, lanes) and share.since
end
wake(shares, lanes)
return {1, owned, era, closed}

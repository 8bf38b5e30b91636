-- Makes a worker the owner of sequences that wait for one, those that were handed over first, and tells it their steps.
-- KEYS: the lanes that they wait in, by priority, then the worker's own lane.
-- ARGV: partition's prefix, whether Redis may lose, worker, count, bits of the numbers that the model is told (0 = it takes text, '' = it is
--   told nothing), names of the lanes they wait in.
-- Returns {whether the worker's lease is alive, {name, life, token, committed, generation, kind, idle ms, whether the tenant is another
--   than the model's first one, the number that the model is told in place of its id (0 = none)} of each}.
begin(ARGV[1], ARGV[2])
make_room()
local worker, left, bits = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local owned = {}
if tonumber(redis.call('ZSCORE', prefix .. 'sequence-owners', worker) or 0) <= now then return {0, {}} end

local function take(of)
  local other, number = false, of.number
  if bits then other, number = tell_apart(of.name, number, bits, math.max(of.kept - now, TOMBSTONE_MS)) end
  write(of, {number = number, owner = worker, token = of.token + 1, ticket = '', used = now})
  redis.call('SADD', prefix .. 'sequence-owned:' .. worker, of.name)
  redis.call('ZADD', prefix .. 'sequences', now + LOOK_MS, of.name)
  each_step(of.name, function(id, step)
    if tonumber(step.l) == of.life then
      local n = tonumber(step.n)
      tell(of, id, of.life, n, n == of.committed + 1 and of.deaths + 1 or 1, n > of.committed and step.f, step.p or '')
    end
  end)
  owned[#owned + 1] = {of.name, of.life, of.token, of.committed, of.generation, of.kind, string.format('%.0f', of.idle),
    other and 1 or 0, number}
  left = left - 1
end

for i = 1, #KEYS - 1 do
  local tickets = left > 0 and redis.call('XRANGE', KEYS[i], '-', '+', 'COUNT', left) or {}
  for _, ticket in ipairs(tickets) do
    local of = load(ticket[2][2])
    if of and of.state == 'open' and of.ticket == ARGV[5 + i] .. ' ' .. ticket[1] then take(of) end
    redis.call('XDEL', KEYS[i], ticket[1])
  end
end
return {1, owned}
